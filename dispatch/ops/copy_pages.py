"""Copies whole pages within one arena."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample


def copy_pages(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """`arena[dst[i]] = arena[src[i]]` for every i, as if all reads happened before any write.

    arena u8 [P, bytes] (mutated; rows may be strided), src and dst int64 [M], dst unique; a page may be in both.
    Exact.
    """
    arena[dst] = arena[src].clone()


def _sample(name: str, pages: int, size: int, src: list[int], dst: list[int], tags: set[str]) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        arena = torch.randint(0, 256, (pages, size + 16), dtype=torch.uint8, generator=g)
        return {
            "arena": arena[:, :size] if name == "strided" else arena[:, :size].contiguous(),
            "src": torch.tensor(src, dtype=torch.int64),
            "dst": torch.tensor(dst, dtype=torch.int64),
        }

    return Sample(name, make, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """One page, a chain and a swap (reads before writes), one source to many, itself, none, strided, and many."""
    yield _sample("one", 4, 64, [1], [3], {"tiny"})
    yield _sample("chain", 5, 64, [0, 1, 2], [1, 2, 3], {"tiny", "adversarial"})
    yield _sample("swap", 4, 33, [1, 2], [2, 1], {"must", "edge", "adversarial"})
    yield _sample("fan_out", 6, 16, [2, 2, 2], [0, 5, 3], {"edge", "adversarial"})
    yield _sample("itself", 3, 16, [1], [1], {"edge", "adversarial"})
    yield _sample("none", 3, 16, [], [], {"edge", "adversarial"})
    yield _sample("strided", 6, 48, [0, 3], [4, 1], {"must", "edge"})
    yield _sample("many", 300, 256, list(range(100)), list(range(150, 250)), {"must", "edge"})
    yield _sample("k3_states", 66, 6_291_456, list(range(32)), list(range(33, 65)), {"k3", "device"})


def cost(arena: Tensor, src: Tensor, dst: Tensor) -> Cost:
    """Each page read and written once."""
    return Cost(0.0, 2.0 * src.numel() * arena.shape[1] + src.nbytes + dst.nbytes)


OPERATOR = Operator(
    reference=copy_pages,
    family="engine",
    outputs={"arena": "exact"},
    samples=samples,
    cost=cost,
    mutates=("arena",),
    invariants=("reads_before_writes", "far"),
)
