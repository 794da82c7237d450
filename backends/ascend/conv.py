"""The short convolution by torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.backends.ascend._plain import NEEDS, PRIORITY, live_rows, zeroed
from k3hal.dispatch import provides


@provides("causal_conv1d", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def causal_conv1d(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """See the operator. Histories and rows lie in one tensor, from which each tap takes its rows by number."""
    taken, rows = weight.shape[1] - 1, x.shape[0]
    known = (has_state & (slots != 0)).view(-1, 1, 1)
    history = torch.where(known, conv_state.index_select(0, slots), torch.zeros_like(conv_state[:1]))
    source = torch.cat((history.flatten(0, 1), x))
    at = torch.arange(rows, device=x.device)
    live, sequence = live_rows(cu_seqlens, slots, rows)
    starts, before = cu_seqlens.long(), slots.numel() * taken
    within = at - starts.index_select(0, sequence)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(taken + 1):
        row = torch.where(within + tap >= taken, before + at + tap - taken, sequence * taken + within + tap)
        # A row of padding may be anything: its number is kept inside.
        total += weight[:, tap] * source.index_select(0, row.clamp(0, before + rows - 1)).float()
    _keep(source, conv_state, slots, starts, taken)
    return zeroed(live, silu(total)).to(x.dtype)


def _keep(source: Tensor, conv_state: Tensor, slots: Tensor, starts: Tensor, taken: int) -> None:
    """Leave each live sequence's last rows in its slot. All others write what is there, which slot 0 may do twice."""
    every, lengths = torch.arange(taken, device=slots.device), (starts[1:] - starts[:-1]).unsqueeze(1)
    first = torch.arange(slots.numel(), device=slots.device).unsqueeze(1) * taken
    last = lengths + every - taken
    inside = slots.numel() * taken + starts[:-1].unsqueeze(1) + last
    row = torch.where(last >= 0, inside, first + lengths + every)
    found = source.index_select(0, row.flatten().clamp(0, source.shape[0] - 1)).view(*row.shape, -1)
    live = ((slots != 0) & (lengths.squeeze(1) > 0)).view(-1, 1, 1)
    at = slots.long()
    conv_state[at] = torch.where(live, found, conv_state[at])
