"""Attention residuals: add, mix over depth, norm and the stored block in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides

FEW_ROWS = 256
"""Up to here, about two rows a multiprocessor, latency is what counts and not bandwidth."""


def _with(held: bool | None, warps: int = 8, stages: int = 3) -> Callable[..., Tensor]:
    """`held` None: by the number of rows. What cannot be held is streamed in either case."""

    def attn_res_mix(
        prefix: Tensor,
        delta: Tensor | None,
        blocks: Tensor,
        num_blocks: int,
        reset: bool,
        store: bool,
        key_weight: Tensor,
        out_weight: Tensor | None,
        eps: float,
        out_eps: float,
    ) -> Tensor:
        launch = kernels("attn_res_mix")
        hold = prefix.shape[0] <= FEW_ROWS if held is None else held
        hold = hold and launch.can_hold(prefix, delta, blocks, num_blocks, key_weight, out_weight)
        return launch.attn_res_mix(
            prefix, delta, blocks, num_blocks, reset, store, key_weight, out_weight, eps, out_eps, hold, warps, stages,
        )  # fmt: skip

    return attn_res_mix


attn_res_mix = provides(
    "attn_res_mix",
    name="fused",
    needs=NEEDS,
    supports=runs,
    graph_safe=True,
    tactics={
        "held": _with(True),
        **{f"streamed{w}x{s}": _with(False, w, s) for w, s in ((4, 2), (8, 1), (8, 2), (16, 1), (16, 2), (16, 3))},
    },
)(_with(None))
