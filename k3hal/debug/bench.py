"""Times providers whose output was verified first, against what this machine reaches in a copy and a matmul."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.case import TOO_LARGE, Case
from k3hal.debug.ceilings import Ceilings
from k3hal.debug.check import check, describe
from k3hal.debug.device_timing import CapturedCalls, rounds_of, time_on_device
from k3hal.debug.golden import golden
from k3hal.debug.host_timing import host_seconds
from k3hal.debug.memory import GuardedCopy
from k3hal.debug.rotation import Cache, RotatedCalls
from k3hal.debug.target import Target, find_target, peer_of
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import DispatchError, UsageError
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for


@dataclass(frozen=True, slots=True)
class Timing:
    """One provider on one case. `verdict` is of the same call; `seconds` is None unless it passed, or failed and was to
    be timed all the same.

    `seconds` is the median of several samples, `spread` the largest over the smallest (the ninth decile over the first
    on an accelerator). `flops` and `bytes` are the operator's own count of the least work; `floor` are the seconds a
    copy of as many bytes takes, `roofline` the share of `seconds` that a copy or matmul of the same work takes, the
    longer of the two. `in_a_row`, `method` and `why` are an accelerator's: see `Times`. Between two calls on one of the
    `copies` the others moved `rotated_bytes`: with `cache` cold, more than caches hold where copies can be that many.
    """

    verdict: Verdict
    flops: float
    bytes: float
    seconds: float | None = None
    spread: float | None = None
    roofline: float | None = None
    floor: float | None = None
    in_a_row: float | None = None
    method: str = "host clock"
    why: str = ""
    cache: Cache = "warm"
    copies: int = 1
    rotated_bytes: float = 0.0
    dtype: str = ""

    def to_json(self) -> dict[str, Any]:
        rates = {}
        if self.seconds:
            rates = {"flops_per_s": self.flops / self.seconds, "bytes_per_s": self.bytes / self.seconds}
        own = {k: v for k, v in asdict(self).items() if k != "verdict"}
        return {**self.verdict.to_json(), **own, "seconds": self.seconds, **rates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        own = {field.name: data[field.name] for field in fields(cls) if field.name != "verdict"}
        return cls(Verdict.from_json(data), **own)


def bench_cases(
    cases: Iterable[Case],
    providers: Iterable[str],
    device: DeviceDescription,
    ceilings: Mapping[str, Ceilings],
    budget: float,
    cache: Cache = "cold",
    *,
    failing: bool = False,
) -> Iterator[Timing]:
    """Verify every provider on every case and time those that pass, for about `budget` seconds each.

    `ceilings` are those of each case's dtype. On a CPU everything is timed with warm caches. `failing` as `CaseBench`.
    """
    providers = list(providers)
    for case in cases:
        bench = CaseBench(case, device, budget, cache, failing=failing)
        for provider in providers:
            yield bench.timing(provider, ceilings[case.dtype])


class CaseBench:
    """One case, and its golden once for all providers.

    What is of full size is judged where it runs: by the reference in fp64, on the device. With `failing` what runs and
    is wrong is timed as well.
    """

    def __init__(
        self, case: Case, device: DeviceDescription, budget: float, cache: Cache = "cold", *, failing: bool = False
    ) -> None:
        self._runtime, self._device, self._budget, self._failing = runtime_for(device), device, budget, failing
        self._cache: Cache = cache
        self._cost = get_operator(case.op).cost(**case.args)
        # Ties are settled on the host, but for what is too large for it.
        large = TOO_LARGE in case.tags or ("k3" in case.tags and get_operator(case.op).settle_ties is None)
        self._there = large and device.vendor != "cpu"
        self._where = device.torch_device if self._there else "cpu"
        self._case = replace(case, args=GuardedCopy(case.args, self._where).args) if self._there else case
        self._golden: Mapping[str, Tensor] | None = None

    def timing(self, provider: str, ceilings: Ceilings) -> Timing:
        """The provider's verdict, and its times if it is right or `failing` ones are timed."""
        target = None
        try:
            target = find_target(self._case, provider, self._device)
            verdict = self._verdict(target)
        except (DispatchError, UsageError) as error:  # of a tactic that another operator's provider has, say
            verdict = Verdict(self._case.op, provider, self._case.id, "NotSupported", (str(error),))
        floor = self._cost.bytes / ceilings.bytes_per_s
        timing = Timing(verdict, self._cost.flops, self._cost.bytes, floor=floor, dtype=self._case.dtype)
        if target is None or not (verdict.ok or (self._failing and verdict.status == "Fail")):
            return timing
        timing = self._timed(timing, target)
        # Graphs and copies go before the next ones come.
        gc.collect()
        if not timing.seconds:
            return timing
        return replace(timing, roofline=ceilings.seconds(timing.flops, timing.bytes) / timing.seconds)

    def _verdict(self, target: Target) -> Verdict:
        if self._golden is None:
            self._golden = golden(get_operator(self._case.op), self._case.args, self._where)
        peer = None if self._there else peer_of(self._case, target, probe("cpu"))
        return check(self._case, target, peer=peer, expected=self._golden, where=self._where)

    @torch.inference_mode()
    def _timed(self, timing: Timing, target: Target) -> Timing:
        runtime = self._runtime
        if runtime.device.vendor == "cpu":
            rotated = RotatedCalls(self._case, target, runtime, "warm", self._cost.bytes)
            seconds, spread = host_seconds(runtime, rotated.calls[0], self._budget)
            return replace(timing, seconds=seconds, spread=spread)
        rotated = RotatedCalls(self._case, target, runtime, self._cache, self._cost.bytes)
        for call in rotated.calls:
            call()
        graph, why = _captured(runtime, target, rotated)
        times = time_on_device(runtime, rotated.calls, self._budget, graph, why)
        stale = rotated.stale(runtime, graph) if graph else ""
        if stale:
            wrong = replace(timing.verdict, status="Fail", problems=(*timing.verdict.problems, stale))
            return replace(timing, verdict=wrong)
        measured: dict[str, Any] = {
            name: getattr(times, name) for name in ("seconds", "spread", "in_a_row", "method", "why")
        }
        timing = replace(timing, **measured, cache=self._cache)
        return replace(timing, copies=len(rotated.calls), rotated_bytes=rotated.rotated_bytes)


def _captured(runtime: DeviceRuntime, target: Target, rotated: RotatedCalls) -> tuple[CapturedCalls | None, str]:
    """The calls in a graph, or why there is none."""
    if not runtime.supports_graphs:
        return None, f"{runtime.device.id} has no graphs"
    if not target.graph_safe:
        return None, f"{target.id} does not say that it may be captured"
    try:
        return CapturedCalls(runtime, rotated.calls, rounds_of(runtime, rotated.calls)), ""
    except Exception as error:  # noqa: BLE001 - what capturing raises is the provider's result, and is said
        return None, f"capturing it {describe(error)}"
