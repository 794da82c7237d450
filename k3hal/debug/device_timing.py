"""Times of a call on a device with queues: by its own events, from cold caches, and without launches if it can."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from k3hal.dispatch.runtime import DeviceRuntime

FLUSHED_BYTES = 1 << 29
"""Written between two samples: more than the last-level cache of any accelerator (256 MB on an MI300)."""
IN_A_ROW = 20
LEAST, MOST = 9, 200


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: the median `seconds` with cold caches, and `in_a_row`, the median of a call among several
    that follow each other, whose caches are warm. `spread` is the ninth decile over the first of the cold samples.
    `method` says what was between the two events: a `graph`'s replay, or `calls`."""

    seconds: float
    spread: float
    in_a_row: float
    method: str


def replayable(runtime: DeviceRuntime, call: Callable[[], Any], times: int = 1) -> Callable[[], None]:
    """A captured graph of so many calls, which must have run once before. What capturing raises passes through."""

    def work() -> None:
        for _ in range(times):
            call()

    return runtime.capture(work).replay


def time_on_device(runtime: DeviceRuntime, call: Callable[[], Any], budget: float, *, captured: bool) -> Times:
    """Times within about `budget` seconds; `captured` calls are replayed from graphs. An event is recorded by the host
    while the device still empties its caches, so that no launch of the host's shows."""
    call()
    runtime.synchronize()
    flush = runtime.allocate(FLUSHED_BYTES)
    stream = runtime.current_stream()
    once = replayable(runtime, call) if captured else call
    row = replayable(runtime, call, IN_A_ROW) if captured else lambda: [call() for _ in range(IN_A_ROW)]

    def samples(work: Callable[[], Any], share: float) -> list[float]:
        def sample() -> Any:
            flush.zero_()
            begun = stream.record()
            work()
            return begun, stream.record()

        sample()
        runtime.synchronize()
        started = time.perf_counter()
        sample()
        runtime.synchronize()
        rounds = int(budget * share / max(time.perf_counter() - started, 1e-6))
        pairs = [sample() for _ in range(min(max(rounds, LEAST), MOST))]
        runtime.synchronize()
        return [max(end.elapsed_since(begun), 1e-9) for begun, end in pairs]

    cold = samples(once, 0.7)
    deciles = quantiles(cold, n=10, method="inclusive")
    warm = median(samples(row, 0.3)) / IN_A_ROW
    return Times(median(cold), deciles[-1] / deciles[0], warm, "graph" if captured else "calls")
