"""Ways to run one case that a sweep may vary: each tactic, eager or from a graph, warm or as a process's first call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3hal.debug.case import Case
from k3hal.debug.case_file import load_case
from k3hal.debug.case_files import CaseFiles
from k3hal.debug.check import check, describe
from k3hal.debug.compare import How, compare_all, compare_one
from k3hal.debug.execute import Calls, execute
from k3hal.debug.forks import Forks
from k3hal.debug.golden import golden
from k3hal.debug.graph import replayed
from k3hal.debug.judge import judge
from k3hal.debug.target import Target, find_target, peer_of, tactic_names
from k3hal.debug.verdict import Verdict, worst
from k3hal.dispatch.errors import DispatchError
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

WAYS = ("tactic", "mode", "start")
COLD = f"{__name__}:first_call"


def ways_of(grid: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The part of a grid that says how cases are run."""
    return {axis: grid[axis] for axis in WAYS if axis in grid}


def compare_ways(
    case: Case, providers: Sequence[str], how: How, ways: Mapping[str, Sequence[Any]], forks: Forks | None
) -> Iterator[Verdict]:
    """The case with every provider in every way; `forks` is needed for `start=cold`.

    `warm` runs are judged after two that are not, `cold` ones are the first call in a process of their own.
    """
    modes, starts = ways.get("mode", ("eager",)), ways.get("start", ("",))
    for provider in providers:
        for name in tactic_names(case, provider, how.device, ways["tactic"]) if "tactic" in ways else [provider]:
            for mode, start in itertools.product(modes, starts):
                shown = f"{case.id}{f' [{mode}]' if 'mode' in ways else ''}{f' [{start}]' if start else ''}"
                verdict = _one_way(case, name, how, mode, start, forks)
                extra = {axis: value for axis, value in (("mode", mode), ("start", start)) if axis in ways}
                yield replace(verdict, case=shown, extra={**verdict.extra, **extra})


def _one_way(case: Case, name: str, how: How, mode: str, start: str, forks: Forks | None) -> Verdict:
    if mode == "graph":
        return _from_graph(case, name, how)
    if start == "cold":
        assert forks is not None
        return _cold(case, name, how, forks)
    if start == "warm":
        return _warm(case, name, how)
    ((_, verdict),) = compare_all([case], [name], how)
    return verdict


def _warm(case: Case, name: str, how: How) -> Verdict:
    try:
        calls = Calls(get_operator(case.op), find_target(case, name, how.device))
        for _ in range(2):
            calls(case.args)
    except DispatchError as error:
        return Verdict(case.op, name, case.id, "NotSupported", (str(error),))
    except Exception as error:  # noqa: BLE001 - what a provider raises is its result
        return Verdict(case.op, name, case.id, "Fail", (describe(error),))
    verdict = compare_one(case, name, how.device, against=how.against, repeat=how.repeat)
    return _with_problems(verdict, calls.problems)


def _with_problems(verdict: Verdict, problems: Sequence[str]) -> Verdict:
    """The verdict, failed for what other calls did wrong."""
    if not problems:
        return verdict
    both = tuple(dict.fromkeys((*verdict.problems, *problems)))
    return replace(verdict, status=worst([verdict.status, "Fail"]), problems=both)


def _cold(case: Case, name: str, how: How, forks: Forks) -> Verdict:
    with CaseFiles() as files:
        options = {"provider": name, "device": how.device.id, "against": how.against, "repeat": how.repeat}
        outcome = forks.run(COLD, how.timeout, case=files.case(case), **options)
    if outcome.status == "Done":
        return Verdict.from_json(outcome.report)
    return Verdict(case.op, name, case.id, outcome.status, (outcome.why,))


def first_call(
    report: Callable[[Any], None], *, case: str, provider: str, device: str, against: str, repeat: bool
) -> None:
    """The job of a cold run: nothing of the operator has run in its process before."""
    report(compare_one(load_case(case), provider, probe(device), against=against, repeat=repeat).to_json())


def _from_graph(case: Case, name: str, how: How) -> Verdict:
    """A graph captured from the call, every replay of it judged by the golden; the first replay is cold."""
    operator = get_operator(case.op)
    try:
        target = find_target(case, name, how.device)
    except DispatchError as error:
        return Verdict(case.op, name, case.id, "NotSupported", (str(error),))
    eager = check(case, target, peer=peer_of(case, target, probe("cpu")))
    if not eager.ok:
        return replace(eager, problems=("not captured, since the eager call is not right", *eager.problems))
    calls = Calls(operator, target)
    try:
        runs = replayed(calls, case)
    except Exception as error:  # noqa: BLE001 - what a provider raises is its result
        return Verdict(case.op, target.id, case.id, "Fail", (f"under capture it {describe(error)}",))
    if not runs:
        why = f"{how.device.id} has no graphs" if how.device.vendor == "cpu" else f"{target.id} is not safe to capture"
        return Verdict(case.op, target.id, case.id, "NotSupported", (why,))
    expected, peer = golden(operator, case.args), _peer_outputs(case, target)
    tensors = tuple(n for run in runs for n in judge(operator, case.args, run, expected, peer))
    verdict = Verdict(case.op, target.id, case.id, worst([t.status for t in tensors]), (), tensors)
    return _with_problems(verdict, calls.problems)


def _peer_outputs(case: Case, target: Target) -> Any:
    peer = peer_of(case, target, probe("cpu"))
    return execute(get_operator(case.op), peer, case.args).outputs if peer else None
