"""KDA decode in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._kda import laid_out, supports
from k3hal.backends.triton._triton import NEEDS, kernels
from k3hal.dispatch import provides

TILES = {
    "rows128_warps4": (128, 4, 255),
    "rows64_warps8": (64, 8, 128),
    "rows32_warps8": (32, 8, 128),
    "rows32_warps4": (32, 4, 128),
    "rows16_warps4": (16, 4, 96),
}
"""Rows of the state at a time, warps, and registers a thread: what decides how many bytes are on their way."""


def _of(rows: int, warps: int, registers: int) -> Callable[..., Tensor]:
    def kda_decode(
        qkv: Tensor,
        raw_gate: Tensor,
        beta_logits: Tensor,
        out_gate: Tensor,
        conv_weight: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        """See the operator. Prepared by `laid_out`."""
        return kernels("kda_decode").kda_decode(
            qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
            conv_state, state, slots, lower_bound, eps, rows, warps, registers,
        )  # fmt: skip

    return kda_decode


kda_decode = provides(
    "kda_decode", name="fused", needs=NEEDS, supports=supports, prepare=laid_out, graph_safe=True,
    tactics={name: _of(*tile) for name, tile in TILES.items()},
)(_of(128, 8, 128))  # fmt: skip
