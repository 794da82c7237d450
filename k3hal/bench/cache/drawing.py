"""What the generators of traces share: fresh token ids, and requests put in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from k3hal.bench.cache.trace import Span, TraceRequest


class IdSource:
    """Hands out token ids that nobody else of a trace has."""

    def __init__(self) -> None:
        self._next = 1_000

    def span(self, size: int) -> Span:
        self._next += size
        return Span(self._next - size, size)


def in_order(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests sorted by arrival, `after` renamed from places in `requests` to places in the result."""
    order = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    place = {old: new for new, old in enumerate(order)}
    return [
        requests[i] if (after := requests[i].after) is None else replace(requests[i], after=place[after]) for i in order
    ]


def even(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    """An integer drawn evenly, both ends included."""
    return int(rng.integers(ends[0], ends[1] + 1))
