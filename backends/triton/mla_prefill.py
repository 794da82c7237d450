"""MLA prefill with cached context: windows of keys and values expanded from the latents, flash attention over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, cache_supported, kernels
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call

SCRATCH, LITTLE_SCRATCH = 1 << 30, 1 << 16
# queries and keys of a tile, warps, stages
Shape = tuple[int, int, int, int]
OTHER_TILINGS: Mapping[str, Shape] = {
    "stages2": (128, 64, 8, 2),
    "keys128": (128, 128, 8, 2),
    "queries64": (64, 64, 4, 2),
}


def _default(q: Tensor) -> Shape:
    from k3hal.backends.triton.kernels.programs import shared_memory

    if q.element_size() == 4:  # No matrix unit multiplies fp32 exactly.
        return (16, 32, 4, 1)
    return (128, 64, 8, 3) if shared_memory(q.device) > 176 << 10 else (64, 32, 4, 2)


def _tiled(shape: Shape | None = None, scratch: int = SCRATCH) -> Callable[..., Tensor]:
    def mla_prefill(
        q: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        cu_seqlens: Tensor,
        context_lens: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        scale: float,
    ) -> Tensor:
        """See the operator."""
        kernel = kernels("mla_prefill")
        tiling = kernel.Tiling(*(shape or _default(q)), scratch)
        return kernel.mla_prefill(q, kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, scale, tiling)

    return mla_prefill


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    # Little scratch is for where memory is short; it also shows what passes from window to window.
    little = {"little_scratch": _tiled(scratch=LITTLE_SCRATCH)}
    if call.device.vendor == "cpu":
        return little
    if call.dtype == "float32" or call.device.vendor == "amd":
        return {}
    return {name: _tiled(shape) for name, shape in OTHER_TILINGS.items()}


mla_prefill = provides(
    "mla_prefill", name="expanded", needs=NEEDS, supports=cache_supported, graph_safe=True, tactics=_tactics
)(_tiled())
