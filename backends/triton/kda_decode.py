"""KDA decode in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._kda import laid_out, supports
from k3hal.backends.triton._triton import NEEDS, kernels
from k3hal.dispatch import provides

TACTICS = {
    "warps4_keep": (4, 255, ""),
    "warps8": (8, 128, "evict_first"),
    "warps8_more": (8, 255, "evict_first"),
    "warps16": (16, 64, "evict_first"),
}
"""Warps, registers a thread, and what the second-level cache is told about the state."""


def _of(warps: int, registers: int, hint: str) -> Callable[..., Tensor]:
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
            conv_state, state, slots, lower_bound, eps, warps, registers, hint,
        )  # fmt: skip

    return kda_decode


kda_decode = provides(
    "kda_decode", name="fused", needs=NEEDS, supports=supports, prepare=laid_out, graph_safe=True,
    tactics={name: _of(*tile) for name, tile in TACTICS.items()},
)(_of(4, 255, "evict_first"))  # fmt: skip
