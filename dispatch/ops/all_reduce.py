"""Sum over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of every rank's x, of x's shape and dtype, the same on each rank.

    x any shape, not mutated. A None group is one rank: x itself is returned.
    """
    if group is None:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def one_rank(shape: tuple[int, ...], dtype: str = "bfloat16", **arguments: Any) -> Sample:
    """A sample on one rank."""

    def make(g: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(*shape, generator=g).to(getattr(torch, dtype)), "group": None, **arguments}

    return Sample("x".join(map(str, shape)), make, {"ranks": 1}, dtype)


def samples() -> Iterator[Sample]:
    """One rank; several ranks need a process group, which tests make."""
    yield one_rank((3, 8))
    yield one_rank((0, 8), "float32")


def cost(x: Tensor, group: dist.ProcessGroup | None) -> Cost:
    """A ring sends and receives each element 2 (n - 1) / n times."""
    ranks = 1 if group is None else group.size()
    return Cost(float(x.numel() * (ranks - 1)), 2.0 * x.nbytes * (ranks - 1) / ranks)


OPERATOR = Operator(reference=all_reduce, family="collective", outputs={"out": "matmul"}, samples=samples, cost=cost)
