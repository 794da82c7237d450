"""How long steps take the host, and how long the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from k3hal.dispatch.runtime import DeviceRuntime, Event

Part = Literal["schedule", "launch", "wait", "deliver"]


@dataclass(slots=True)
class StepTimes:
    """Seconds of the host, one for each step: planning it (`schedule`), queueing its work on the device (`launch`),
    waiting for what it sampled (`wait`), and handing that out (`deliver`).

    Of the device, if it has a `runtime`, the beginning and the end of each step's work, with what the device waits for
    the host in between: nothing where a step is a replay.
    """

    runtime: DeviceRuntime | None = None
    schedule: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    deliver: list[float] = field(default_factory=list)
    _begin: Event | None = None
    _spans: list[tuple[Event, Event]] = field(default_factory=list)

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        begin = perf_counter()
        yield
        getattr(self, name).append(perf_counter() - begin)

    def begins(self) -> None:
        """The device's work of a step is queued from now on."""
        if self.runtime is not None:
            self._begin = self.runtime.current_stream().record()

    def ends(self) -> None:
        """The device's work of the step that began last is queued."""
        if self.runtime is not None and self._begin is not None:
            self._spans.append((self._begin, self.runtime.current_stream().record()))
            self._begin = None

    def device(self) -> list[float]:
        """Seconds from the beginning to the end of each step on the device. All steps must have ended."""
        return [end.elapsed_since(begin) for begin, end in self._spans]

    def idle(self) -> list[float]:
        """Seconds between the end of each step on the device and the beginning of the next, one less than steps."""
        pairs = zip(self._spans, self._spans[1:], strict=False)
        return [begin.elapsed_since(end) for (_, end), (begin, _) in pairs]

    def idle_share(self) -> float:
        """What share of the time from the first step's beginning to the last one's end the device had no step."""
        if not self._spans:
            return 0.0
        return sum(self.idle()) / max(self._spans[-1][1].elapsed_since(self._spans[0][0]), 1e-9)
