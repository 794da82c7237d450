"""Times many operators in a process of their own, which is started again after a crash or a hang."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from k3hal.debug.bench import CaseBench, Timing
from k3hal.debug.case import Case, sample_case, samples_of
from k3hal.debug.ceilings import Ceilings, measure_ceilings
from k3hal.debug.rotation import Cache
from k3hal.debug.verdict import Status, Verdict
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

WORKER = "k3hal.debug.bench_worker"
Key = tuple[str, str, str, str]
"""Operator, sample, dtype and provider: what is timed once."""
Say = Callable[[Mapping[str, Any]], None]
Note = Callable[[Timing | Ceilings], None]


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What is to be timed, in order; `seconds` for each. What begins more than `limit` seconds after the start is left
    out. `failing` as `CaseBench` has it."""

    keys: tuple[Key, ...]
    device: str
    seconds: float
    cache: Cache = "cold"
    seed: int = 0
    limit: float = 86_400.0
    failing: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchJob:
        return cls(**{**data, "keys": tuple(tuple(key) for key in data["keys"])})


@dataclass(slots=True)
class BenchResult:
    """What came of a job: timings in order, ceilings by dtype, and what no time was left for."""

    timings: list[Timing]
    ceilings: dict[str, Ceilings]
    left_out: list[Key]


def run_job(job: BenchJob, say: Say) -> None:
    """Run it in this process. Says `at` a key before it begins, and then its `timing`, or that it was `left_out`;
    and `ceilings` before the first of a dtype."""
    device, started = probe(job.device), time.monotonic()
    ceilings: dict[str, Ceilings] = {}
    made: tuple[Key, CaseBench] | None = None
    for key in job.keys:
        op, sample, dtype, provider = key
        if time.monotonic() - started > job.limit:
            say({"left_out": key})
            continue
        say({"at": key})
        if dtype not in ceilings:
            ceilings[dtype] = measure_ceilings(device, dtype)
            say({"ceilings": asdict(ceilings[dtype])})
        if made is None or made[0][:3] != key[:3]:
            made = None  # its tensors go before the next ones come
            case = _case(op, sample, dtype, job.seed)
            made = key, CaseBench(case, device, job.seconds, job.cache, failing=job.failing)
        say({"timing": made[1].timing(provider, ceilings[dtype]).to_json()})


def _case(op: str, sample: str, dtype: str, seed: int) -> Case:
    (found,) = samples_of(get_operator(op), names=(sample,), dtypes=(dtype,))
    return sample_case(get_operator(op), found, seed)


def run_here(job: BenchJob, note: Note, into: BenchResult | None = None) -> BenchResult:
    """Run it in this process. What is interrupted leaves `into`, which it fills, as far as it came."""
    result, left = into or BenchResult([], {}, []), list(job.keys)

    def say(said: Mapping[str, Any]) -> None:
        if _take(result, said, note):
            left.pop(0)

    try:
        run_job(job, say)
    finally:
        result.left_out += left
    return result


def _take(result: BenchResult, said: Mapping[str, Any], note: Note) -> bool:
    """Put what was said where it belongs; whether a key is done with."""
    if "ceilings" in said:
        limit = Ceilings(**said["ceilings"])
        if limit.dtype not in result.ceilings:
            note(limit)
        result.ceilings[limit.dtype] = limit
    elif "timing" in said:
        result.timings.append(Timing.from_json(said["timing"]))
        note(result.timings[-1])
    elif "left_out" in said:
        result.left_out.append(said["left_out"])
    return "timing" in said or "left_out" in said


def run_isolated(job: BenchJob, timeout: float, note: Note, into: BenchResult | None = None) -> BenchResult:
    """Run it in a child process. Where that dies, or says nothing for `timeout` seconds, the one at work is a Crash or
    a Timeout, and a new child goes on with the next. `into` as `run_here`."""
    result, left = into or BenchResult([], {}, []), list(job.keys)
    try:
        _run_all(job, left, timeout, note, result)
    finally:
        result.left_out += left
    return result


def _run_all(job: BenchJob, left: list[Key], timeout: float, note: Note, result: BenchResult) -> None:
    """Take from `left` what is done with, until nothing is."""
    begun = time.monotonic()
    while left:
        rest = replace(job, keys=tuple(left), limit=max(0.0, job.limit - (time.monotonic() - begun)))
        ended: tuple[Status, str] = ("Crash", "it ended early and said nothing")
        for said in _child(rest, timeout):
            if "ended" in said:
                ended = said["ended"]
            elif _take(result, said, note):
                left.pop(0)
        if left:
            op, sample, dtype, provider = left.pop(0)
            name = f"{op}-{sample}-{dtype}" + (f"-seed{job.seed}" if job.seed else "")
            bad = Timing(Verdict(op, provider, name, ended[0], (ended[1],)), 0.0, 0.0, dtype=dtype)
            result.timings.append(bad)
            note(bad)


def _child(job: BenchJob, timeout: float) -> Iterator[Mapping[str, Any]]:
    """What the child says, line by line; the last is how it `ended` unless it ended well."""
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", WORKER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as child:
        assert child.stdin and child.stdout and child.stderr
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(asdict(job)).encode())
                child.stdin.close()
            errors = _Tail(child.stderr.fileno())
            for line in _lines(child.stdout.fileno(), errors, timeout):
                if line is None:
                    yield {"ended": ("Timeout", f"said nothing for {timeout:g} s")}
                    return
                yield json.loads(line)
            if child.wait():
                yield {"ended": ("Crash", f"ended with code {child.returncode}: {errors.last()}")}
        finally:
            child.kill()


class _Tail:
    """The end of what comes out of a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._end = descriptor, b""

    def read(self) -> bool:
        """Take what is there; whether there may be more."""
        data = os.read(self.descriptor, 1 << 16)
        self._end = (self._end + data)[-4096:]
        return bool(data)

    def last(self) -> str:
        """The last line."""
        return next(iter(self._end.decode(errors="replace").strip().splitlines()[-1:]), "")


def _lines(descriptor: int, errors: _Tail, timeout: float) -> Iterator[bytes | None]:
    """Lines as they come, `errors` read meanwhile; None, once, after `timeout` seconds without one."""
    data, open_ = b"", {descriptor, errors.descriptor}
    deadline = time.monotonic() + timeout
    while open_:
        ready, _, _ = select.select(sorted(open_), [], [], max(0.0, deadline - time.monotonic()))
        if not ready and time.monotonic() >= deadline:
            yield None
            return
        if errors.descriptor in ready and not errors.read():
            open_.discard(errors.descriptor)
        if descriptor in ready:
            more = os.read(descriptor, 1 << 16)
            if not more:
                open_.discard(descriptor)
            *lines, data = (data + more).split(b"\n")
            if lines:
                deadline = time.monotonic() + timeout
            yield from lines
