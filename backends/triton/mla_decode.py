"""Absorbed MLA decoding over the paged cache: split KV, each cached row read once for all heads of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, cache_supported, kernels
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call

# rows of a tile, warps, stages, least rows of a chunk, most chunks of a sequence, programs a processor
Shape = tuple[int, int, int, int, int, int]
OTHER_TILINGS: Mapping[str, Shape] = {
    "rows32_s4": (32, 4, 4, 512, 256, 1),
    "rows32_s3_chunk1024": (32, 4, 3, 1024, 128, 2),
    "rows32_s3_chunk256": (32, 4, 3, 256, 256, 2),
    "rows64_s2": (64, 4, 2, 512, 256, 1),
    "rows64_s3": (64, 4, 3, 512, 256, 1),
    "rows64_w8": (64, 8, 3, 1024, 128, 1),
    "rows16_s6": (16, 4, 6, 512, 256, 2),
}
DEFAULT_TILING: Shape = (32, 4, 3, 512, 256, 2)
WIDE_TILING: Shape = (16, 4, 1, 512, 256, 2)
"""For fp32, which no matrix unit multiplies exactly."""


def _tiled(shape: Shape | None = None) -> Callable[..., Tensor]:
    def mla_decode(
        q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int
    ) -> Tensor:
        """See the operator."""
        kernel = kernels("mla_decode")
        tiling = kernel.Tiling(*(shape or (WIDE_TILING if q.element_size() == 4 else DEFAULT_TILING)))
        return kernel.mla_decode(q, kv_cache, page_table, seq_lens, scale, kv_lora, tiling)

    return mla_decode


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    return {} if call.dtype == "float32" else {name: _tiled(shape) for name, shape in OTHER_TILINGS.items()}


mla_decode = provides(
    "mla_decode", name="split_kv", needs=NEEDS, supports=cache_supported, graph_safe=True, tactics=_tactics
)(_tiled())
