"""KDA decode on CPU: one pass of small batched steps, and per sequence only the work on its state, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from k3hal.backends.cpu.kda_gate import log_decay
from k3hal.backends.cpu.kda_recurrent import recur
from k3hal.dispatch import provides


def _transposed_taps(conv_weight: Tensor, **others: Tensor) -> Mapping[str, Any]:
    return {"conv_weight": conv_weight.t().contiguous(), **others}


@provides("kda_decode", name="batched", prepare=_transposed_taps)
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
    """See the operator. `conv_weight` comes prepared as [W, C], contiguous."""
    ids = slots.tolist()
    if 0 in ids:
        live = slots.nonzero().squeeze(-1)
        out = torch.zeros(len(ids), out_gate[0].numel(), dtype=qkv.dtype)
        if live.numel():
            out[live] = kda_decode(
                qkv[live], raw_gate[live], beta_logits[live], out_gate[live], conv_weight, A_log, dt_bias, norm_weight,
                conv_state, state, slots[live], lower_bound, eps,
            )  # fmt: skip
        return out
    mixed = _convolve(qkv, conv_weight, conv_state, slots, ids).view(len(ids), 3, *raw_gate.shape[1:])
    decay = log_decay(raw_gate, A_log, dt_bias, lower_bound).exp_()
    beta = torch.sigmoid(beta_logits.float())
    read = recur(mixed[:, :2], mixed[:, 2], decay, beta, [state[slot] for slot in ids])
    # `read` lacks the factor K^-0.5. RMSNorm is blind to a factor once eps carries its square.
    dim = read.shape[-1]
    normed = rms_norm(read, (dim,), norm_weight, eps * dim)
    return normed.mul_(torch.sigmoid(out_gate.float())).to(qkv.dtype).flatten(1)


def _convolve(qkv: Tensor, taps: Tensor, conv_state: Tensor, slots: Tensor, ids: list[int]) -> Tensor:
    """The convolved rows [N, C], fp32 values rounded to the activation dtype; shifts the histories."""
    one = len(ids) == 1
    history = conv_state[ids[0]].unsqueeze(0) if one else conv_state.index_select(0, slots)
    window = torch.cat((history, qkv.unsqueeze(1)), 1)
    if one:
        history.copy_(window[:, 1:])
    else:
        conv_state.index_copy_(0, slots.long(), window[:, 1:])
    mixed = silu((window * taps).sum(1), inplace=True)
    return mixed if qkv.dtype == torch.float32 else mixed.to(qkv.dtype).float()
