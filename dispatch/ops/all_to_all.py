"""Every rank sends an equal part to every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops.all_reduce import one_rank


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Part s of the result is part r of rank s's x, on rank r; parts are equal slices of the first axis.

    x [n * m, ..] on each of n ranks, not mutated. A None group is one rank: x itself is returned.
    """
    if group is None:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def samples() -> Iterator[Sample]:
    """One rank; several ranks need a process group, which tests make."""
    yield one_rank((4, 8))
    yield one_rank((2, 3, 8), "float32")


def cost(x: Tensor, group: dist.ProcessGroup | None) -> Cost:
    """Receives every part but its own."""
    ranks = 1 if group is None else group.size()
    return Cost(0.0, x.nbytes * (ranks - 1) / ranks)


OPERATOR = Operator(reference=all_to_all, family="collective", outputs={"out": "exact"}, samples=samples, cost=cost)
