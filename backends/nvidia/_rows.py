"""Rows of packed batches, arranged as the libraries want them, without a value leaving the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


def sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The sequence each packed row belongs to, int64 [rows]; their number for a padding row."""
    every = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), every, right=True)


def live_rows(cu_seqlens: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Bool [rows]: rows of a sequence with a slot."""
    live = torch.cat((slots != 0, slots.new_zeros(1, dtype=torch.bool)))
    return live[sequence_of_rows(cu_seqlens, rows)]


def gathered_states(state: Tensor, slots: Tensor, has_state: Tensor) -> Tensor:
    """A copy [N, ...] of the states, zeros where a sequence starts."""
    return torch.where(_like(has_state & (slots != 0), state), state[slots.long()], 0.0)


def write_back(state: Tensor, new: Tensor, slots: Tensor, cu_seqlens: Tensor) -> None:
    """Put the states of sequences that have a slot and a token where they belong; all others keep their bytes."""
    live = (slots != 0) & (cu_seqlens[1:] > cu_seqlens[:-1])
    at = slots.long()
    state[at] = torch.where(_like(live, state), new.to(state.dtype), state[at])


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (x.ndim - 1))


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


@dataclass(frozen=True, slots=True)
class Grouped:
    """The choices `ids` [T, k] sorted by expert: `order` int64 [T k] says which choice comes where, `counts` int32 [E]
    how many each expert has. Choices of no expert come last."""

    order: Tensor
    counts: Tensor
    expert: Tensor
    """Of each sorted choice, int64 [T k]; E where it has none."""

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Grouped:
        flat = torch.where(ids < 0, experts, ids).flatten().long()
        expert, order = flat.sort(stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return cls(order, counts[:experts], expert)

    def combined(self, rows: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """`sum_j weights[t, j] * row` over each token's choices [T, D], from sorted rows [T k, D]."""
        tokens, choices = ids.shape
        unsorted = torch.empty_like(rows)
        unsorted[self.order] = rows
        each = unsorted.view(tokens, choices, -1).float() * weights.unsqueeze(-1)
        return torch.where((ids >= 0).unsqueeze(-1), each, 0.0).sum(1).to(dtype)
