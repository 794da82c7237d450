"""The causal convolution over packed rows for vendors that have none, without a value leaving the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.dispatch.transforms.rows import sequence_of_rows
from k3hal.dispatch.transforms.states import gathered_states, write_back


def convolved(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """`causal_conv1d` of the rows [T, C], the states updated; garbage in rows that no sequence with a slot has."""
    rows, width = x.shape[0], weight.shape[1]
    start = cu_seqlens.long()
    padded = torch.cat((gathered_states(conv_state, slots, has_state), conv_state.new_zeros(1, *conv_state.shape[1:])))
    sequence = sequence_of_rows(cu_seqlens, rows)
    first = torch.cat((start[:-1], start[-1:]))[sequence]
    at = torch.arange(rows, device=x.device)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(width):
        source = at - (width - 1) + tap
        earlier = (width - 1 + source - first).clamp(0, width - 2)
        row = torch.where((source >= first).unsqueeze(-1), x[source.clamp_min(0)], padded[sequence, earlier])
        total += weight[:, tap] * row.float()
    last = start[1:, None] - (width - 1) + torch.arange(width - 1, device=x.device)
    inside = (last >= start[:-1, None]).unsqueeze(-1)
    old = (width - 1 + last - start[:-1, None]).clamp(0, width - 2)
    history = padded[torch.arange(slots.numel(), device=x.device)[:, None], old]
    write_back(conv_state, torch.where(inside, x[last.clamp(0, max(rows - 1, 0))], history), slots, cu_seqlens)
    return silu(total).to(x.dtype)
