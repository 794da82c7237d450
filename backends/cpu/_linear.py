"""`x @ weight.T` in the forms that stream a weight at memory speed when there are few rows."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this many rows, MKL is up to twice as fast with the weights as the left operand and the rows as column-major
# right operand; above it the usual form wins (256 x 512, one thread, 32 cold matrices x 15 layers: 27 against 46 ms at
# 4 rows, 40 against 44 at 8, 71 against 48 at 12).
FEW_ROWS = 10


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [M, N] of x [M, K] with dense rows and one fp32 weight [N, K]."""
    if x.shape[0] == 1:
        return rows_times_stack(x, weight[None])
    if x.shape[0] < FEW_ROWS:
        return torch.mm(weight, x.t()).t()
    return torch.mm(x, weight.t())


def rows_times_stack(rows: Tensor, stack: Tensor) -> Tensor:
    """`rows[i] @ stack[i].T` [g, N] of rows [g, K] with dense rows and fp32 matrices [g, N, K].

    MKL's matrix-vector product reaches a third of the memory bandwidth; its batched product reaches all of it, but only
    with a batch of at least two and column-major right operands. So a single matrix goes as its two halves.
    """
    groups, count, width = stack.shape
    columns = rows[:, None].transpose(1, 2)
    if groups == 1 and count % 2 == 0:
        stack, columns = stack.view(2, count // 2, width), columns.expand(2, width, 1)
    return torch.bmm(stack, columns).view(groups, count)
