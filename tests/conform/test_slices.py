"""One operator's checks divided among lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from k3hal.conform.pool import Outcome
from k3hal.conform.selection import Candidate, Selection
from k3hal.conform.slices import SLICE, joined, slices
from k3hal.conform.worker import Task

CANDIDATES = tuple(Candidate("rms_norm", name, "acme") for name in ("acme.a", "acme.b", "acme.c"))


def _task(folder: Path, op: str = "rms_norm") -> Task:
    return Task(op, Selection("cpu", ops=op, large=True, graphs=True), CANDIDATES, str(folder))


def test_slices_hold_every_check_once_and_the_checks_of_a_case_together(tmp_path: Path) -> None:
    task = _task(tmp_path)
    parts = slices(task)
    assert len(parts) > 1
    held = [check.key for part in parts for check in part.checks()]
    assert sorted(held) == sorted(check.key for check in task.checks())
    cases = [{check.case_id for check in part.checks()} for part in parts]
    assert sum(len(mine) for mine in cases) == len(set().union(*cases))
    assert all(len(part.checks()) * len(CANDIDATES) < 3 * SLICE for part in parts)


def test_large_cases_go_to_different_slices(tmp_path: Path) -> None:
    large = [sum(c.shape_class in ("k3", "device") for c in part.checks()) for part in slices(_task(tmp_path))]
    one_case = max(len([c for c in _task(tmp_path).checks() if c.case_id == _task(tmp_path).checks()[0].case_id]), 1)
    assert max(large) - min(large) <= one_case


def test_a_short_task_stays_whole(tmp_path: Path) -> None:
    task = replace(_task(tmp_path), candidates=CANDIDATES[:1], selection=Selection("cpu", ops="rms_norm", quick=True))
    assert slices(task) == [task]


def test_a_sliced_task_survives_its_way_to_a_child(tmp_path: Path) -> None:
    part = slices(_task(tmp_path))[1]
    assert [c.key for c in Task.from_json(part.to_json()).checks()] == [c.key for c in part.checks()]


def test_what_slices_found_stands_in_the_order_of_the_whole(tmp_path: Path) -> None:
    task = _task(tmp_path)
    parts = [
        Outcome(
            [replace(check.result(one.provider), status="Pass") for one in CANDIDATES[1:] for check in part.checks()],
            {CANDIDATES[0].provider: [check.key for check in part.checks()]},
        )
        for part in reversed(slices(task))
    ]
    whole = joined(parts, task.checks(), CANDIDATES)
    wanted = [(check.key, one.provider) for check in task.checks() for one in CANDIDATES[1:]]
    assert [(f"{r.case} {r.kind}", r.provider) for r in whole.results] == wanted
    assert whole.skipped == {CANDIDATES[0].provider: [check.key for check in task.checks()]}
