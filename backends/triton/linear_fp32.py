"""Products with an fp32 result: router scores and logits, where the vendor's BLAS cannot give one of bf16 factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call

# rows, outputs and depth of a tile, warps, stages
Shape = tuple[int, int, int, int, int]
DEFAULT_TILING: Shape = (16, 32, 128, 4, 2)
OTHER_TILINGS: Mapping[str, Shape] = {
    "n16_k256": (16, 16, 256, 4, 2),
    "n64_k128": (16, 64, 128, 4, 2),
    "m64_n64": (64, 64, 64, 4, 2),
}
WIDE_TILING: Shape = (16, 16, 32, 4, 1)
"""For fp32, which no matrix unit multiplies exactly."""


def _tiled(shape: Shape | None = None) -> Callable[..., Tensor]:
    def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
        """See the operator."""
        kernel = kernels("linear_fp32")
        tiling = kernel.Tiling(*(shape or (WIDE_TILING if x.element_size() == 4 else DEFAULT_TILING)))
        return kernel.linear_fp32(x, weight, tiling)

    return linear_fp32


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    return {} if call.dtype == "float32" else {name: _tiled(shape) for name, shape in OTHER_TILINGS.items()}


linear_fp32 = provides("linear_fp32", name="tiled", needs=NEEDS, supports=runs, graph_safe=True, tactics=_tactics)(
    _tiled()
)
