"""Times of a call on a device with queues: by its own events, in a graph where it can be captured, and launched."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles
from typing import Any

from k3hal.dispatch.runtime import DeviceRuntime

FLUSHED_BYTES = 1 << 29
"""Written before every sample: more than the last-level cache of any accelerator (256 MB on an MI300)."""
IN_A_ROW = 20
LEAST, MOST = 9, 200
FEW = 3
"""Samples of what takes longer than `SLOW` seconds each, where `LEAST` would be many budgets."""
SLOW = 0.1
_LONG = 4e-3
"""Seconds of work beside which starting a graph, or launching a call, some 10 us, does not show."""
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: the median `seconds`, and `in_a_row`, the median of one among several that the host launches
    one after the other; one alone where that is long. `spread` is the ninth decile over the first. `method` says what
    `seconds` is of: a `graph` of many calls, or `calls`, each launched by itself, and then `why` no graph."""

    seconds: float
    spread: float
    in_a_row: float
    method: str
    why: str = ""


def replayable(runtime: DeviceRuntime, call: Call, times: int = 1) -> Callable[[], None]:
    """A captured graph of so many calls, which must have run once before. What capturing raises passes through."""

    def work() -> None:
        for _ in range(times):
            call()

    return runtime.capture(work).replay


class CapturedCalls:
    """A graph of so many rounds through `calls`, each of which has run before, and what each of them `returned`: so
    long as this lives, no two write their results to one place."""

    def __init__(self, runtime: DeviceRuntime, calls: Sequence[Call], rounds: int) -> None:
        self.returned: list[Any] = []
        self.rounds, self.calls = rounds, rounds * len(calls)

        def work() -> None:
            for _ in range(rounds):
                self.returned += [call() for call in calls]

        self.replay = runtime.capture(work).replay


def rounds_of(runtime: DeviceRuntime, calls: Sequence[Call]) -> int:
    """How often to go through `calls` in one graph for its start not to show."""
    seconds = max(_seconds(runtime, lambda: [call() for call in calls]), 1e-7)
    return max(1, min(ceil(IN_A_ROW / len(calls)), ceil(_LONG / seconds)))


def time_on_device(
    runtime: DeviceRuntime, calls: Sequence[Call], budget: float, captured: CapturedCalls | None, why: str = ""
) -> Times:
    """Times of one of `calls`, all warm, within about `budget` seconds: of `captured` if there is a graph of them.

    `calls` are one call on its several copies of the arguments. Before `seconds` begin, caches are emptied: while the
    device does that the host has time to record the event and to start the graph. Launches in a row begin at rest.
    """
    flush, stream = runtime.allocate(FLUSHED_BYTES), runtime.current_stream()

    def samples(work: Call, share: float, *, emptied: bool) -> list[float]:
        def sample() -> Any:
            if emptied:
                flush.zero_()
            else:
                runtime.synchronize()
            begun = stream.record()
            work()
            return begun, stream.record()

        sample()
        each = max(_seconds(runtime, sample), 1e-6)
        pairs = [sample() for _ in range(min(max(int(budget * share / each), LEAST if each < SLOW else FEW), MOST))]
        runtime.synchronize()
        return [max(end.elapsed_since(begun), 1e-9) for begun, end in pairs]

    length = min(IN_A_ROW, ceil(_LONG / max(_seconds(runtime, calls[0]), 1e-6)))
    row = (list(calls) * length)[:length]
    launched = [seconds / len(row) for seconds in samples(lambda: [call() for call in row], 0.3, emptied=False)]
    if captured:
        timed = [seconds / captured.calls for seconds in samples(captured.replay, 0.7, emptied=True)]
    else:
        timed = samples(calls[0], 0.7, emptied=True)
    deciles = quantiles(timed, n=10, method="inclusive")
    return Times(median(timed), deciles[-1] / deciles[0], median(launched), "graph" if captured else "calls", why)


def _seconds(runtime: DeviceRuntime, work: Call) -> float:
    """Seconds until `work` is done, by the host's clock."""
    runtime.synchronize()
    started = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - started
