"""A runtime whose work waits in a queue until it is waited for, and whose clock counts the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.runtime import MemoryFigures


@dataclass
class QueuedEvent:
    """`at` is None until the work before the event is done."""

    at: float | None = None

    def elapsed_since(self, earlier: QueuedEvent) -> float:
        assert self.at is not None, "read before the device was waited for"
        assert earlier.at is not None
        return self.at - earlier.at


@dataclass
class QueuedGraph:
    """Calls seen while capturing, by what they cost."""

    device: QueuedDevice
    costs: list[float]

    def replay(self) -> None:
        self.device.queue += self.costs


@dataclass
class QueuedDevice:
    """Its own stream. A call costs what `work` is given; a launch from the host `LAUNCH` more, but not in a graph."""

    device: DeviceDescription
    supports_graphs: bool = True
    LAUNCH = 1e-3
    now: float = 0.0
    queue: list[Any] = field(default_factory=list)
    captures: int = 0
    flushed: int = 0
    _capturing: bool = False

    def work(self, cost: float) -> None:
        self.queue.append(cost if self._capturing else cost + self.LAUNCH)

    def record(self) -> QueuedEvent:
        event = QueuedEvent()
        self.queue.append(event)
        return event

    def current_stream(self) -> QueuedDevice:
        return self

    def synchronize(self) -> None:
        for one in self.queue:
            if isinstance(one, QueuedEvent):
                one.at = self.now
            else:
                self.now += one
        self.queue.clear()

    def capture(self, work: Callable[[], None]) -> QueuedGraph:
        assert not self.queue, "captured while work is under way"
        self.captures, self._capturing = self.captures + 1, True
        work()
        self._capturing = False
        graph = QueuedGraph(self, list(self.queue))
        self.queue.clear()
        return graph

    def memory(self) -> MemoryFigures:
        return MemoryFigures(1 << 30, 1 << 30)

    def allocate(self, num_bytes: int) -> Any:
        return _Flushed(self)


@dataclass
class _Flushed:
    device: QueuedDevice

    def zero_(self) -> torch.Tensor:
        self.device.flushed += 1
        self.device.queue.append(0.02)
        return torch.zeros(0)
