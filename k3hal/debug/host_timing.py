"""Times of a call by the host's clock, as a CPU is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from k3hal.dispatch.runtime import DeviceRuntime

_SAMPLES = 7


@torch.inference_mode()
def host_seconds(runtime: DeviceRuntime, call: Callable[[], Any], budget: float) -> tuple[float, float]:
    """Seconds of one warm call, the median of several samples, and the slowest sample over the fastest.

    A sample is as many calls as take a share of the budget, so that the clock's steps do not show.
    """
    call()
    runtime.synchronize()
    begun = time.perf_counter()
    call()
    runtime.synchronize()
    once = max(time.perf_counter() - begun, 1e-7)
    calls = max(1, int(budget / _SAMPLES / once))
    samples = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        runtime.synchronize()
        samples.append((time.perf_counter() - begun) / calls)
    return median(samples), max(samples) / min(samples)
