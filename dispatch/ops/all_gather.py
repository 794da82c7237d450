"""Every rank's tensor, joined."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops.all_reduce import one_rank


def all_gather(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """Every rank's x joined along `dim` in rank order, the same on each rank.

    x any shape, the same on each rank, not mutated. A None group is one rank: x itself is returned.
    """
    if group is None:
        return x
    parts = [x.new_empty(x.shape) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def samples() -> Iterator[Sample]:
    """One rank; several ranks need a process group, which tests make."""
    yield one_rank((3, 8), dim=0)
    yield one_rank((3, 8), "float32", dim=-1)


def cost(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Cost:
    """Receives every other rank's part."""
    ranks = 1 if group is None else group.size()
    return Cost(0.0, float(x.nbytes * (ranks - 1)))


OPERATOR = Operator(reference=all_gather, family="collective", outputs={"out": "exact"}, samples=samples, cost=cost)
