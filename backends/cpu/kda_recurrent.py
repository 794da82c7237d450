"""One step of KDA's recurrence on CPU, on the states in place."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends._kda_chunks import unit_scale
from k3hal.dispatch import provides


@provides("kda_recurrent", name="in_place")
def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """See the operator."""
    ids = slots.tolist()
    if 0 in ids:
        out, live = torch.zeros(v.shape, dtype=v.dtype), slots.nonzero().squeeze(-1)
        if live.numel():
            out[live] = kda_recurrent(q[live], k[live], v[live], g[live], beta[live], state, slots[live])
        return out
    states = [state[slot] for slot in ids]
    read = recur(torch.stack((q, k), 1).float(), v.float(), g.exp(), beta, states)
    return read.mul_(q.shape[-1] ** -0.5).to(v.dtype)


def recur(qk: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: list[Tensor]) -> Tensor:
    """Advance the states [H, V, K] in place; returns the outputs without their factor K^-0.5, [N, H, V]. All fp32.

    qk [N, 2, H, K] raw, v [N, H, V], decay = exp(g) [N, H, K], beta [N, H]. With S the old state and D the decay,
    S' k = S (D k) and S_new q = S (D q) + u (k . q): the state is read once for both products, then updated. Only that
    is done for each sequence by itself: a gather of all states would cost more than it saves.
    """
    qk = qk * unit_scale(qk)
    q, k = qk.unbind(1)
    probes = (qk * decay.unsqueeze(1)).transpose(1, 2)
    reads = torch.empty(probes.shape)
    for read, probe, state in zip(reads.unbind(0), probes.unbind(0), states, strict=True):
        torch.bmm(probe, state.transpose(1, 2), out=read)
    u = (v - reads[:, :, 1]).mul_(beta.unsqueeze(-1))
    scales, columns, rows = decay.unsqueeze(2), u.unsqueeze(3), k.unsqueeze(2)
    for state, scale, column, row in zip(states, scales.unbind(0), columns.unbind(0), rows.unbind(0), strict=True):
        state.mul_(scale).addcmul_(column, row)
    return torch.addcmul(reads[:, :, 0], u, torch.linalg.vecdot(q, k).unsqueeze(-1))
