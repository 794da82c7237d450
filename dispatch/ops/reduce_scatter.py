"""Sum over the ranks of a group, each rank keeping its part."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops.all_reduce import one_rank


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """Part r, along `dim`, of the sum of every rank's x, on rank r of the group's n.

    x any shape, not mutated; x.shape[dim] a multiple of n. A None group is one rank: x itself is returned.
    """
    if group is None:
        return x
    parts = [part.contiguous() for part in x.chunk(group.size(), dim)]
    out = parts[0].new_empty(parts[0].shape)
    dist.reduce_scatter(out, parts, group=group)
    return out


def samples() -> Iterator[Sample]:
    """One rank; several ranks need a process group, which tests make."""
    yield one_rank((4, 8), dim=0)
    yield one_rank((3, 8), "float32", dim=1)


def cost(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Cost:
    """A ring sends and receives each element (n - 1) / n times."""
    ranks = 1 if group is None else group.size()
    return Cost(float(x.numel() * (ranks - 1)) / ranks, x.nbytes * (ranks - 1) / ranks)


OPERATOR = Operator(
    reference=reduce_scatter, family="collective", outputs={"out": "matmul"}, samples=samples, cost=cost
)
