"""A device that is the CPU in disguise: graphs that run their work again, and a host that would have to wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from k3hal.backends.cpu.runtime import CpuRuntime, CpuStream
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import Event


@dataclass
class SlowEvent:
    """Over once it or a later one was waited for, or it was asked for a few times. Nobody may read or overwrite before.

    `number` orders events.
    """

    runtime: ClosureRuntime
    number: int
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.number <= self.runtime.reached or self.asked > 3

    def synchronize(self) -> None:
        self.runtime.waits += 1
        if self.runtime.lost:
            raise RuntimeError("simulated loss of the device")
        self.runtime.reached = max(self.runtime.reached, self.number)

    def elapsed_since(self, earlier: Event) -> float:
        assert isinstance(earlier, SlowEvent)
        return float(self.number - earlier.number)


@dataclass
class ClosureStream(CpuStream):
    runtime: ClosureRuntime

    def record(self) -> SlowEvent:
        self.runtime.events += 1
        return SlowEvent(self.runtime, self.runtime.events)


@dataclass
class ClosureGraph:
    work: Callable[[], None]

    def replay(self) -> None:
        with torch.inference_mode():
            self.work()


@dataclass
class ClosureRuntime(CpuRuntime):
    """Counts what it is asked for. `lost`: it does no more work."""

    device: DeviceDescription = field(default_factory=lambda: probe("cpu"))
    events: int = 0
    reached: int = 0
    waits: int = 0
    captured: int = 0
    pools: int = 0
    lost: bool = False
    supports_graphs = True
    asynchronous = True

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        # Whoever reads what was never written reads nonsense.
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def current_stream(self) -> ClosureStream:
        return ClosureStream(self)

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("simulated loss of the device")

    def graph_pool(self) -> int:
        self.pools += 1
        return self.pools

    def capture(self, work: Callable[[], None], pool: Any = None) -> ClosureGraph:
        assert pool == self.pools
        self.captured += 1
        return ClosureGraph(work)
