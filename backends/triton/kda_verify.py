"""KDA over draft tokens in one launch, and what of them is kept in another."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._kda import laid_out, rate, supports
from k3hal.backends.triton._triton import NEEDS, kernels
from k3hal.dispatch import provides


def _of(warps: int) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    def kda_verify(
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
        width: int,
        lower_bound: float | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See the operator. Prepared by `laid_out`."""
        return kernels("kda_verify").kda_verify(
            qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
            conv_state, state, slots, width, lower_bound, eps, warps,
        )  # fmt: skip

    return kda_verify


kda_verify = provides(
    "kda_verify", name="fused", needs=NEEDS, supports=supports, prepare=laid_out, graph_safe=True,
    tactics={"warps8": _of(8)},
)(_of(4))  # fmt: skip


@provides("kda_commit", name="fused", needs=NEEDS, supports=supports, prepare=rate, graph_safe=True)
def kda_commit(
    u: Tensor,
    k: Tensor,
    raw_gate: Tensor,
    conv_in: Tensor,
    accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: float | None,
) -> None:
    """See the operator. `A_log` comes prepared as its exponential."""
    kernels("kda_verify").kda_commit(
        u, k, raw_gate, conv_in, accepted, A_log, dt_bias, conv_state, state, slots, lower_bound
    )  # fmt: skip
