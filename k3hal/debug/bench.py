"""Times providers whose output was verified first, against what this machine reaches in a copy and a matmul."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from k3hal.debug.case import Case
from k3hal.debug.compare import compare_one
from k3hal.debug.device_timing import time_on_device
from k3hal.debug.memory import GuardedCopy
from k3hal.debug.target import Target, find_target
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for

_COPY_BYTES = {"cpu": 1 << 28}
_COPY_BYTES_DEVICE = 1 << 30
_MATMUL = {"cpu": 1024}
_MATMUL_DEVICE = 8192
_SAMPLES = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine reached in this run: bytes/s of a copy (read and written counted), FLOP/s of a square matmul."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str
    threads: int

    def seconds(self, flops: float, moved: float) -> float:
        """The least time that much work takes under both."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Timing:
    """One provider on one case. `verdict` is of the same call; `seconds` is None unless it passed.

    `seconds` is the median of several samples, `spread` the largest over the smallest (the ninth decile over the first
    on an accelerator). `flops` and `bytes` are the operator's own count of the least work. `in_a_row` and `method` are
    an accelerator's: see `Times`.
    """

    verdict: Verdict
    flops: float
    bytes: float
    seconds: float | None = None
    spread: float | None = None
    roofline: float | None = None
    in_a_row: float | None = None
    method: str = "host clock"

    def to_json(self) -> dict[str, Any]:
        rates = {}
        if self.seconds:
            rates = {"flops_per_s": self.flops / self.seconds, "bytes_per_s": self.bytes / self.seconds}
        own = {k: v for k, v in asdict(self).items() if k != "verdict"}
        return {**self.verdict.to_json(), **own, "seconds": self.seconds, **rates}


def measure_ceilings(device: DeviceDescription, dtype: str) -> Ceilings:
    """Copy a large buffer and multiply two square matrices of the dtype, as fast as torch does."""
    runtime, where = runtime_for(device), torch.device(device.torch_device)
    source = torch.ones(_COPY_BYTES.get(where.type, _COPY_BYTES_DEVICE), dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy = _seconds(runtime, lambda: target.copy_(source), 0.3)[0]
    size = _MATMUL.get(where.type, _MATMUL_DEVICE)
    a, b = (torch.randn(size, size, device=where).to(getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    matmul = _seconds(runtime, lambda: torch.mm(a, b, out=product), 0.5)[0]
    return Ceilings(2 * source.numel() / copy, 2.0 * size**3 / matmul, dtype, torch.get_num_threads())


def bench_cases(
    cases: Iterable[Case],
    providers: Iterable[str],
    device: DeviceDescription,
    ceilings: Mapping[str, Ceilings],
    budget: float,
) -> Iterator[Timing]:
    """Verify every provider on every case and time those that pass, for about `budget` seconds each.

    `ceilings` are those of each case's dtype.
    """
    providers = list(providers)
    runtime = runtime_for(device)
    for case in cases:
        operator = get_operator(case.op)
        cost = operator.cost(**case.args)
        for provider in providers:
            verdict = compare_one(case, provider, device)
            timing = Timing(verdict, cost.flops, cost.bytes)
            if verdict.ok:
                timing = _timed(timing, case, find_target(case, provider, device), runtime, budget)
                least = ceilings[case.dtype].seconds(cost.flops, cost.bytes)
                timing = replace(timing, roofline=least / timing.seconds if timing.seconds else None)
            yield timing


@torch.inference_mode()
def _timed(timing: Timing, case: Case, target: Target, runtime: DeviceRuntime, budget: float) -> Timing:
    call = _call(case, target)
    if runtime.device.vendor == "cpu":
        seconds, spread = _seconds(runtime, call, budget)
        return replace(timing, seconds=seconds, spread=spread)
    captured = runtime.supports_graphs and target.graph_safe
    times = time_on_device(runtime, call, budget, captured=captured)
    return replace(
        timing, seconds=times.seconds, spread=times.spread, in_a_row=times.in_a_row, method=times.method
    )  # fmt: skip


def _call(case: Case, target: Target) -> Callable[[], Any]:
    """The call with its weights laid out; it mutates one copy over and over."""
    operator = get_operator(case.op)
    args = GuardedCopy(case.args, target.device).args
    if target.prepare:
        args |= target.prepare(**{name: args[name] for name in operator.weights})

    def call() -> Any:
        return target.fn(**args)

    return call


@torch.inference_mode()
def _seconds(runtime: DeviceRuntime, call: Callable[[], Any], budget: float) -> tuple[float, float]:
    """Seconds of one warm call, the median of several samples, and the slowest sample over the fastest.

    A sample is as many calls as take a share of the budget, so that neither the clock nor a device queue shows.
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
