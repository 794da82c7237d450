"""Divides one operator's checks among lanes, and puts what they found together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from k3hal.conform.pool import Outcome
from k3hal.conform.selection import Candidate
from k3hal.conform.suite import Check
from k3hal.conform.worker import Task

SLICE = 64
"""Checks in a task, about, each counted once for each provider: long enough to be worth its start."""


def slices(task: Task) -> list[Task]:
    """The task as tasks of about `SLICE` checks. The large cases, which stand together, go to different ones."""
    checks = task.checks()
    cases = list(dict.fromkeys(check.case_id for check in checks))
    number = max(min(len(checks) * len(task.candidates) // SLICE, len(cases)), 1)
    if number == 1:
        return [task]
    most = max(task.most_cases // number, 1)
    return [dataclasses.replace(task, cases=tuple(cases[i::number]), most_cases=most) for i in range(number)]


def joined(parts: Sequence[Outcome], checks: Sequence[Check], candidates: Sequence[Candidate]) -> Outcome:
    """One outcome, its results in the order of the checks and then of the candidates, whoever was done first."""
    keys = {check.key: place for place, check in enumerate(checks)}
    names = {one.provider: place for place, one in enumerate(candidates)}
    results = [result for part in parts for result in part.results]
    results.sort(key=lambda result: (keys[f"{result.case} {result.kind}"], names[result.provider]))
    skipped: dict[str, list[str]] = {}
    for part in parts:
        for provider, mine in part.skipped.items():
            skipped.setdefault(provider, []).extend(mine)
    return Outcome(results, {provider: sorted(mine, key=keys.__getitem__) for provider, mine in skipped.items()})
