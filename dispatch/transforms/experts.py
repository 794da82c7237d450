"""Choices of experts sorted by expert, as grouped products want their rows, and the rows summed up again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
