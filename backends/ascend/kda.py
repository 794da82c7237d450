"""KDA by torch: the recurrence of a token, of chunks, and of drafts that may be taken back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.backends._kda_chunks import CHUNK, in_chunks
from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.backends.ascend.light import gated_rms_norm, kda_gate
from k3hal.dispatch import provides
from k3hal.dispatch.ops._kda import delta_step, l2_normalise, split_qkv
from k3hal.dispatch.transforms import zeros_elsewhere


def _stepped(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`delta_step` of N sequences at once: states [N, H, V, K]; new states, corrections and outputs, fp32."""
    shape = state.shape[:2]
    flat = (x.flatten(0, 1) for x in (state, q, k, v, g, beta))
    new, u, out = delta_step(*flat)
    return new.unflatten(0, shape), u.unflatten(0, shape), out.unflatten(0, shape)


def _written(pool: Tensor, new: Tensor, slots: Tensor, keep: Tensor) -> None:
    """Put `new` [N, ...] into slots where `keep` [N]; the others write what is there, which slot 0 may do twice."""
    at = slots.long()
    pool[at] = torch.where(keep.view(-1, *[1] * (pool.ndim - 1)), new.to(pool.dtype), pool[at])


@provides("kda_recurrent", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """See the operator."""
    live = slots != 0
    new, _, out = _stepped(state.index_select(0, slots), q, k, v, g, beta)
    _written(state, new, slots, live)
    return zeros_elsewhere(live, out).to(v.dtype)


# Lengths and slots are fetched to the host.
@provides("kda_chunk", name="torch", needs=NEEDS, priority=PRIORITY)
def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
) -> Tensor:
    """See the operator."""
    return in_chunks(CHUNK, q, k, v, g, beta, state, slots, cu_seqlens, has_state)


@provides("kda_verify", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
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
    """See the operator."""
    each, live = (slots.shape[0], width), slots != 0
    conv_in = qkv.unflatten(0, each)
    window = torch.cat((conv_state.index_select(0, slots), conv_in), 1).float()
    taps = window.unfold(1, conv_weight.shape[1], 1)
    mixed = silu((taps * conv_weight).sum(-1)).to(qkv.dtype)
    q, k, v = (x.unflatten(0, each) for x in split_qkv(mixed.flatten(0, 1), A_log.shape[0]))
    g, beta = (x.unflatten(0, each) for x in kda_gate(raw_gate, beta_logits, A_log, dt_bias, lower_bound))
    current, reads, corrections = state.index_select(0, slots), [], []
    for t in range(width):
        current, u, read = _stepped(current, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        reads.append(read)
        corrections.append(u)
    read, u = torch.stack(reads, 1), zeros_elsewhere(live, torch.stack(corrections, 1))
    out = gated_rms_norm(read.flatten(0, 1), out_gate, norm_weight, eps).flatten(1).to(qkv.dtype)
    kept = zeros_elsewhere(live.repeat_interleave(width), out)
    return kept, u, zeros_elsewhere(live, k.contiguous()), raw_gate.unflatten(0, each), conv_in


@provides("kda_commit", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
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
    """See the operator. Every record is read, and replaced by one that changes nothing where it was not accepted."""
    count, width = accepted.shape[0], u.shape[1]
    taken = torch.arange(width, device=u.device) < accepted.unsqueeze(1)
    gates = zeros_elsewhere(taken, raw_gate)
    g, _ = kda_gate(gates.flatten(0, 1), gates[..., 0].flatten(0, 1), A_log, dt_bias, lower_bound)
    decay = torch.where(taken.view(count, width, 1, 1), g.unflatten(0, (count, width)).exp(), 1.0)
    keys, corrections = l2_normalise(zeros_elsewhere(taken, k)), zeros_elsewhere(taken, u)
    current = state.index_select(0, slots)
    for t in range(width):
        current = current * decay[:, t].unsqueeze(-2) + corrections[:, t].unsqueeze(-1) * keys[:, t].unsqueeze(-2)
    live, history = (slots != 0) & (accepted > 0), conv_state.shape[1]
    window = torch.cat((conv_state.index_select(0, slots), zeros_elsewhere(taken, conv_in)), 1)
    at = accepted.long().unsqueeze(1) + torch.arange(history, device=u.device)
    last = window.gather(1, at.unsqueeze(-1).expand(-1, -1, window.shape[-1]))
    _written(state, current, slots, live)
    _written(conv_state, last, slots, live)
