"""What tuning does in processes of their own: proves one tactic right on cases, and times one against the default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from k3hal.debug.case import Case
from k3hal.debug.case_file import load_case, save_case
from k3hal.debug.case_files import load_golden
from k3hal.debug.check import check
from k3hal.debug.device_timing import IN_A_ROW, replayable
from k3hal.debug.memory import GuardedCopy
from k3hal.debug.shrink import shrink
from k3hal.debug.target import Target, find_target, peer_of
from k3hal.debug.tune_timing import paired
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for

GATE, MEASURE = f"{__name__}:gate", f"{__name__}:measure"
Report = Callable[[Any], None]
_TRIES = 20


def gate(report: Report, *, target: str, device: str, cases: list[str], expected: list[str]) -> None:
    """Check a target on case files, given the golden outputs of each; stops at the first that is not right.

    Reports the index of the case at work, then that case's verdict, then the file of the smallest case that fails.
    """
    machine, host = probe(device), probe("cpu")
    for index, (path, golden) in enumerate(zip(cases, expected, strict=True)):
        report({"case": index})
        case = load_case(path)
        found = find_target(case, target, machine)
        verdict = check(case, found, peer=peer_of(case, found, host), expected=load_golden(golden))
        if not verdict.ok:
            here = {"case": index, "verdict": verdict.to_json()}
            report(here)
            small = shrink(case, lambda c: not check(c, find_target(c, target, machine)).ok, limit=_TRIES)
            if small is not case:
                report(here | {"small": str(save_case(small, Path(f"{path}.small.k3case")))})
            return
    report({"case": None})


def measure(report: Report, *, default: str, target: str, device: str, cases: list[str], seconds: float) -> None:
    """Time two targets in pairs on all the case files in turn; reports the rounds."""
    machine = probe(device)
    loaded = [load_case(path) for path in cases]
    with torch.inference_mode():
        runtime = runtime_for(machine)
        ours, theirs = (
            [_timed(_call(c, found), found, runtime) for c in loaded for found in (find_target(c, name, machine),)]
            for name in (default, target)
        )
        rounds = paired(lambda: _all(ours), lambda: _all(theirs), runtime.synchronize, seconds)
    report([list(times) for times in rounds])


def _timed(call: Callable[[], Any], target: Target, runtime: DeviceRuntime) -> Callable[[], Any]:
    """The call as it is to be timed: many in a graph where that is possible, so that launches do not hide the work."""
    if not (runtime.supports_graphs and target.graph_safe):
        return call
    call()
    runtime.synchronize()
    return replayable(runtime, call, IN_A_ROW)


def _call(case: Case, target: Target) -> Callable[[], Any]:
    """The call with its weights laid out, on a copy of its arguments that it mutates over and over."""
    operator = get_operator(case.op)
    args: Mapping[str, Any] = GuardedCopy(case.args, target.device).args
    if target.prepare:
        args = {**args, **target.prepare(**{name: args[name] for name in operator.weights})}
    return lambda: target.fn(**args)


def _all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()
