"""Times of a layer or an operator of a slice: in a graph where the device has them, cold, inputs rotated."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from k3hal.debug.device_timing import FLUSHED_BYTES, CapturedCalls, rounds_of
from k3hal.debug.host_timing import host_seconds
from k3hal.dispatch.runtime import DeviceRuntime

Call = Callable[[], Any]
_SAMPLES, _LAUNCHES = 11, 5
_EVICTED_BYTES = 1 << 28
"""Read before each timed operator: more than the last-level cache of any accelerator."""
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class CallTime:
    """Seconds of one call on the device, and of the host launching it (None where both are one)."""

    seconds: float
    launched: float | None


class SliceTimer:
    """Medians of a few samples within about `budget` seconds of a CPU's time each."""

    def __init__(self, runtime: DeviceRuntime, budget: float) -> None:
        self._runtime, self._budget = runtime, budget
        self._accelerated = runtime.device.vendor != "cpu"
        self._flush = runtime.allocate(FLUSHED_BYTES if self._accelerated else 0)
        self._evicted = self._flush[:_EVICTED_BYTES].view(torch.int32)
        self._overhead: float | None = None

    def chained(self, calls: Sequence[Call]) -> CallTime:
        """One of `calls`, which follow each other as in a model: in one graph, its start hidden behind a flush."""
        if not self._accelerated:
            return CallTime(host_seconds(self._runtime, calls[0], self._budget)[0], None)
        self._warm(calls)
        if not self._runtime.supports_graphs:
            return self.launched(calls)
        graph = CapturedCalls(self._runtime, calls, rounds_of(self._runtime, calls))
        seconds = self._samples(graph.replay) / graph.calls
        launched = self._launch_seconds(calls[0])
        del graph
        gc.collect()
        return CallTime(seconds, launched)

    def launched(self, calls: Sequence[Call]) -> CallTime:
        """One of `calls`, each launched by itself: for work that takes longer than its launch."""
        if not self._accelerated:
            return CallTime(host_seconds(self._runtime, calls[0], self._budget)[0], None)
        self._warm(calls[:1])
        return CallTime(self._samples(calls[0]), self._launch_seconds(calls[0]))

    def alone(self, calls: Sequence[Call]) -> float:
        """Seconds of one of `calls` with nothing of it in a cache, without those of emptying the cache."""
        if not self._accelerated:
            return host_seconds(self._runtime, calls[0], self._budget)[0]
        self._warm(calls)
        if not self._runtime.supports_graphs:
            return self._samples(calls[0])
        if self._overhead is None:
            self._overhead = self._evicting([lambda: None])
        return max(self._evicting(calls) - self._overhead, 1e-8)

    def _evicting(self, calls: Sequence[Call]) -> float:
        cold = [lambda call=call: (torch.sum(self._evicted), call()) for call in calls]
        self._warm(cold[:1])
        graph = CapturedCalls(self._runtime, cold, max(1, _ROUNDS // len(cold)))
        seconds = self._samples(graph.replay) / graph.calls
        del graph
        gc.collect()
        return seconds

    def _warm(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()
        self._runtime.synchronize()

    def _samples(self, work: Call) -> float:
        """Median device seconds; before each sample a write keeps the device busy while the host gets ahead."""
        stream, pairs = self._runtime.current_stream(), []
        for _ in range(_SAMPLES):
            self._flush.zero_()
            begun = stream.record()
            work()
            pairs.append((begun, stream.record()))
        self._runtime.synchronize()
        return median(max(end.elapsed_since(begun), 1e-9) for begun, end in pairs)

    def _launch_seconds(self, call: Call) -> float:
        """Seconds the host takes to queue one call on a device at rest."""
        taken = []
        for _ in range(_LAUNCHES):
            self._runtime.synchronize()
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        self._runtime.synchronize()
        return median(taken)
