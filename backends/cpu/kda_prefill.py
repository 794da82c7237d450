"""KDA prefill on CPU: the parts in turn, in fp32 from the convolution to the result."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends._kda_chunks import CHUNK, OTHER_CHUNKS, in_chunks
from k3hal.backends.cpu.causal_conv1d import causal_conv1d
from k3hal.backends.cpu.gated_rms_norm import gated_rms_norm
from k3hal.backends.cpu.kda_gate import kda_gate
from k3hal.dispatch import provides
from k3hal.dispatch.ops._kda import live_rows, split_qkv


def _of_length(length: int) -> Callable[..., Tensor]:
    def kda_prefill(
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
        cu_seqlens: Tensor,
        has_state: Tensor,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        """See the operator."""
        mixed = causal_conv1d(qkv, conv_weight, conv_state, slots, cu_seqlens, has_state).float()
        g, beta = kda_gate(raw_gate, beta_logits, A_log, dt_bias, lower_bound)
        read = in_chunks(length, *split_qkv(mixed, A_log.shape[0]), g, beta, state, slots, cu_seqlens, has_state)
        out = gated_rms_norm(read, out_gate, norm_weight, eps).flatten(1)
        dead = ~live_rows(cu_seqlens, slots, out.shape[0])
        return out.masked_fill_(dead.unsqueeze(-1), 0).to(qkv.dtype)

    return kda_prefill


kda_prefill = provides("kda_prefill", name="chunked", tactics={f"chunk{n}": _of_length(n) for n in OTHER_CHUNKS})(
    _of_length(CHUNK)
)
