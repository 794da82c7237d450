"""A conformance run that must end: its time limit, and cases whose golden a host cannot make."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from k3hal.conform.pool import MOST_DEATHS, Deaths, Lane, Limits, _Progress
from k3hal.conform.selection import Candidate, Selection
from k3hal.conform.slices import slices
from k3hal.conform.worker import Task
from k3hal.errors import BackendError

PROVIDERS = ("cpu.rows", "acme.fast")


def _task(folder: Path, *, large: bool) -> Task:
    selection = Selection("cpu", ops="rms_norm", large=large)
    return Task("rms_norm", selection, tuple(Candidate("rms_norm", p, "cpu") for p in PROVIDERS), str(folder))


def test_what_is_not_judged_in_time_counts_as_a_timeout_and_starts_nothing(tmp_path: Path) -> None:
    told: list[int] = []
    task, begun = _task(tmp_path, large=False), time.monotonic()
    with Lane(Limits(), until=begun) as lane:
        outcome = lane.run(task, told.append)
    checks = task.selection.checks("rms_norm")
    assert len(outcome.results) == len(told) == 2 * len(checks)
    assert {(one.status, one.problems) for one in outcome.results} == {
        ("Timeout", ("not judged: the time of the whole run was over",))
    }


def test_time_that_runs_out_in_a_child_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    task, begun = _task(tmp_path, large=False), time.monotonic()
    with Lane(Limits(check=60, start=60), until=begun + 0.5) as lane:
        outcome = lane.run(task, lambda _: None)
    assert time.monotonic() - begun < 30
    assert len(outcome.results) == 2 * len(task.selection.checks("rms_norm"))
    assert "Timeout" in {one.status for one in outcome.results}


def test_a_full_size_case_that_cannot_be_made_fails_alone(tmp_path: Path) -> None:
    progress = _Progress(_task(tmp_path, large=True), lambda _: None, Deaths())
    mine = [c for c in progress.task.selection.checks("rms_norm") if c.shape_class == "device"]
    progress.take({"event": "prepare", "key": mine[0].key})
    progress.died("Timeout", "did not end within 300 s")
    bad = {(one.provider, one.case, one.kind) for one in progress.results}
    assert bad == {(p, c.case_id, c.kind) for p in PROVIDERS for c in mine if c.case_id == mine[0].case_id}
    assert {one.problems for one in progress.results} == {("the case and its golden: did not end within 300 s",)}


def test_a_refused_case_is_not_recorded_for_who_refused_it(tmp_path: Path) -> None:
    task = _task(tmp_path, large=True)
    key = next(c for c in task.selection.checks("rms_norm") if c.shape_class == "device")
    first = replace(task.candidates[0], refused={key.case_id: ("no",)})
    progress = _Progress(replace(task, candidates=(first, task.candidates[1])), lambda _: None, Deaths())
    progress.take({"event": "prepare", "key": key.key})
    progress.died("Crash", "killed")
    assert {one.provider for one in progress.results} == {PROVIDERS[1]}


def test_a_small_case_that_cannot_be_made_is_the_operators_own_fault(tmp_path: Path) -> None:
    progress = _Progress(_task(tmp_path, large=False), lambda _: None, Deaths())
    key = next(c.key for c in progress.task.selection.checks("rms_norm") if c.shape_class == "tiny")
    progress.take({"event": "prepare", "key": key})
    with pytest.raises(BackendError, match="while preparing"):
        progress.died("Crash", "killed")


def test_a_provider_that_ends_processes_in_several_lanes_is_given_up_in_all(tmp_path: Path) -> None:
    deaths, task = Deaths(), _task(tmp_path, large=False)
    parts = slices(replace(task, candidates=task.candidates * 9))[:MOST_DEATHS]
    assert len(parts) == MOST_DEATHS
    for part in parts:
        progress = _Progress(replace(part, candidates=task.candidates), lambda _: None, deaths)
        progress.take({"event": "begin", "provider": PROVIDERS[1], "key": part.checks()[0].key})
        progress.died("Timeout", "did not end within 60 s")
    other = _Progress(replace(parts[0], candidates=task.candidates), lambda _: None, deaths)
    other.give_up_the_deadly()
    assert {(one.provider, one.status) for one in other.results} == {(PROVIDERS[1], "Timeout")}
    assert len(other.results) == len(parts[0].checks())
