"""Per-head projections of absorbed MLA in one launch, from weights as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call

# rows, outputs and depth of a tile, warps, stages
Shape = tuple[int, int, int, int, int]
OTHER_TILINGS: Mapping[str, Shape] = {
    "n32_k128": (16, 32, 128, 4, 3),
    "n64_k128": (16, 64, 128, 4, 3),
    "m64_n64": (64, 64, 64, 4, 4),
    "m64_n128": (64, 128, 64, 4, 3),
}
DEFAULT_TILING: Shape = (16, 64, 64, 4, 4)
WIDE_TILING: Shape = (16, 16, 32, 4, 1)
"""For fp32, which no matrix unit multiplies exactly."""


def _tiled(shape: Shape | None = None) -> Callable[..., Tensor]:
    def head_linear(x: Tensor, weight: Tensor) -> Tensor:
        """See the operator."""
        kernel = kernels("head_linear")
        tiling = kernel.Tiling(*(shape or (WIDE_TILING if x.element_size() == 4 else DEFAULT_TILING)))
        return kernel.head_linear(x, weight, tiling)

    return head_linear


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    return {} if call.dtype == "float32" else {name: _tiled(shape) for name, shape in OTHER_TILINGS.items()}


head_linear = provides("head_linear", name="tiled", needs=NEEDS, supports=runs, graph_safe=True, tactics=_tactics)(
    _tiled()
)
