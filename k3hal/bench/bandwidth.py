"""The memory bandwidth of this machine, measured as STREAM does: by moving buffers no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from k3hal.bench.spread import Spread
from k3hal.dispatch.host import host_memory

BUFFER_BYTES = 256 << 20
"""Of each buffer; less where an eighth of the free memory is less."""

_PASSES = 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second over `buffer_bytes` per buffer: a copy counts what it reads and what it writes, as STREAM does."""

    copy: Spread
    read: Spread
    buffer_bytes: int

    @property
    def best(self) -> float:
        """The fastest pass of all: what a floor must be computed with, since nothing may beat a floor."""
        return max(self.copy.max, self.read.max)


class BandwidthMeter:
    """Collects passes, so that they can be spread over a run whose machine may be busy for a while."""

    def __init__(self) -> None:
        self._bytes = min(BUFFER_BYTES, host_memory()[1] // 8) // 4 * 4
        self._copies: list[float] = []
        self._reads: list[float] = []

    def measure(self) -> None:
        """A few passes of each kind with all of torch's threads; the buffers are freed again."""
        source = torch.ones(self._bytes // 4)
        target = torch.zeros(self._bytes // 4)
        for _ in range(_PASSES):
            self._copies.append(2 * self._bytes / _seconds(lambda: target.copy_(source)))
            self._reads.append(self._bytes / _seconds(lambda: torch.dot(source, source)))

    def result(self) -> Bandwidth:
        return Bandwidth(Spread.of(self._copies), Spread.of(self._reads), self._bytes)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
