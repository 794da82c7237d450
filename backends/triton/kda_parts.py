"""The steps of KDA each by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._kda import rate, supports
from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("kda_gate", name="fused", needs=NEEDS, supports=runs, prepare=rate, graph_safe=True)
def kda_gate(
    raw_gate: Tensor, beta_logits: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """See the operator. `A_log` comes prepared as its exponential."""
    return kernels("kda_parts").kda_gate(raw_gate, beta_logits, A_log, dt_bias, lower_bound)


@provides("causal_conv1d", name="tiled", needs=NEEDS, supports=runs, graph_safe=True)
def causal_conv1d(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """See the operator. Weights are turned in every call: what is prepared cannot be part of a composed operator."""
    return kernels("kda_parts").causal_conv1d(x, weight.t().contiguous(), conv_state, slots, cu_seqlens, has_state)


@provides("gated_rms_norm", name="fused", needs=NEEDS, supports=runs, graph_safe=True)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the operator."""
    return kernels("kda_parts").gated_rms_norm(x, gate, weight, eps)


def _recurrent(rows: int) -> Callable[..., Tensor]:
    def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        """See the operator."""
        return kernels("kda_parts").kda_recurrent(q, k, v, g, beta, state, slots, rows)

    return kda_recurrent


kda_recurrent = provides(
    "kda_recurrent", name="fused", needs=NEEDS, supports=supports, graph_safe=True,
    tactics={f"rows{n}": _recurrent(n) for n in (16, 64)},
)(_recurrent(32))  # fmt: skip
