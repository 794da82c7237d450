"""KDA decode on CPU: one pass of small batched steps, and per sequence only the work on its state, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

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
    decay = _decay(raw_gate, A_log, dt_bias, lower_bound)
    read = _recur(mixed, decay, torch.sigmoid(beta_logits.float()), [state[slot] for slot in ids])
    # `read` carries a factor K = V. RMSNorm is blind to a factor once eps carries its square.
    dim = read.shape[-1]
    normed = rms_norm(read, (dim,), norm_weight, eps * dim * dim)
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


def _decay(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """exp(g) [N, H, K]."""
    shifted, rate = raw_gate.float() + dt_bias, A_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return softplus(shifted).mul_(rate).neg_().exp_()
    return shifted.mul_(rate).sigmoid_().mul_(lower_bound).exp_()


def _recur(mixed: Tensor, decay: Tensor, beta: Tensor, states: list[Tensor]) -> Tensor:
    """Advance the states [H, V, K] in place; returns K times the output, [N, H, V].

    rms_norm with a scaled eps is the L2 norm times K^0.5; the factors are taken out where a scalar is free. With S the
    old state and D the decay, S' k = S (D k) and S_new q = S (D q) + u (k . q), so that the state is read once for
    both products and then updated.
    """
    dim = mixed.shape[-1]
    unit = dim**-0.5
    qk = rms_norm(mixed[:, :2], (dim,), None, 1e-6 / dim)
    probes = (qk * decay.unsqueeze(1)).transpose(1, 2)
    reads = torch.empty(probes.shape)
    for read, probe, state in zip(reads.unbind(0), probes.unbind(0), states, strict=True):
        torch.bmm(probe, state.transpose(1, 2), out=read)
    q, k = qk.unbind(1)
    u = torch.sub(mixed[:, 2], reads[:, :, 1], alpha=unit).mul_(beta.unsqueeze(-1))
    scales, columns, keys = decay.unsqueeze(2), u.unsqueeze(3), k.unsqueeze(2)
    for state, scale, column, key in zip(states, scales.unbind(0), columns.unbind(0), keys.unbind(0), strict=True):
        state.mul_(scale).addcmul_(column, key, value=unit)
    overlap = torch.linalg.vecdot(q, k).unsqueeze(-1)
    return torch.addcmul(reads[:, :, 0], u, overlap, value=unit)
