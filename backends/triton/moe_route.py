"""The router's choice in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides

FEW = 512


def _of_warps(many: int, few: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See the operator."""
        warps = few if logits.shape[0] <= FEW else many
        return kernels("moe_route").moe_route(logits, bias, top_k, renormalize, scale, warps)

    return moe_route


# One warp finds a maximum without a barrier; more have fewer scores each, which is sooner where rows are few.
moe_route = provides(
    "moe_route",
    name="fused",
    needs=NEEDS,
    supports=runs,
    graph_safe=True,
    tactics={f"warps{n}": _of_warps(n, n) for n in (1, 2, 8)},
)(_of_warps(1, 4))
