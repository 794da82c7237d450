"""Speed measured after the checks: what was timed stays, whatever happens to the process that measures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from k3hal.conform import run
from k3hal.conform.end_to_end import EndToEnd
from k3hal.conform.measure import Measured, measure_isolated, measured_checks
from k3hal.conform.processes import Processes
from k3hal.conform.run import exit_code
from k3hal.conform.selection import Candidate, Selection
from k3hal.conform.suite import Check
from k3hal.dispatch.registry import operator_names

SELECTION = Selection("cpu", ops="rms_norm", quick=True)
ROW = {"op": "rms_norm", "provider": "acme.fast", "case": "one", "dtype": "float32", "seconds": 1e-6, "roofline": 0.5}


class Measuring(Processes):
    """A process that has timed two providers of a case and then ends as told."""

    def __init__(self, end: int | subprocess.TimeoutExpired, *, began: bool = True) -> None:
        super().__init__()
        self._end, self._began = end, began

    def run(self, command: Sequence[str], job: str, timeout: float) -> tuple[int, str]:
        if self._began:
            rows = [ROW, ROW | {"provider": "acme.slow", "seconds": 3e-6}]
            Path(command[-1]).write_text(json.dumps({"timings": rows, "now": "rms_norm-k3-bfloat16"}), "utf-8")
        if isinstance(self._end, subprocess.TimeoutExpired):
            raise self._end
        return self._end, "out of memory"


@pytest.mark.parametrize(
    ("end", "why"),
    [(-9, "code -9: out of memory"), (subprocess.TimeoutExpired("measure", 5), "the time was over"), (0, "")],
)
def test_timings_stay_when_the_process_dies_or_the_time_is_over(end: int, why: str) -> None:
    measured = measure_isolated(SELECTION, {"rms_norm": ["acme.fast"]}, (), Measuring(end))
    assert [row["peer"]["provider"] for row in measured.timings] == ["acme.slow", "acme.fast"]
    assert measured.problem == (f"speed was measured up to rms_norm-k3-bfloat16: {why}" if why else "")


def test_a_process_that_dies_before_it_begins_has_a_reason() -> None:
    measured = measure_isolated(SELECTION, {"rms_norm": ["acme.fast"]}, (), Measuring(1, began=False))
    assert measured.timings == [] and measured.problem == "no speed was measured: code 1: out of memory"


def test_operators_that_models_ran_are_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(_: Selection, providers: Mapping[str, Sequence[str]], *rest: Any) -> Measured:
        asked.extend(providers)
        return Measured([])

    monkeypatch.setattr(run, "measure_isolated", measure)
    found = {op: [Candidate(op, "acme.fast", "acme")] for op in ("mx_quantize", "rms_norm", "step_metadata")}
    found["embed"] = [Candidate("embed", "acme.fast", "acme", available=False)]
    ends = [EndToEnd("nano", "bfloat16", "Pass", ran=(("step_metadata", "acme.fast"), ("embed", "reference")))]
    run._measured(SELECTION, found, ends, run.How(bench=True), 10.0)
    assert asked == ["step_metadata", "mx_quantize", "rms_norm"]


def test_what_was_not_measured_shows_in_the_exit_code() -> None:
    report = {"checks": [{"status": "Pass"}], "end_to_end": [], "waivers": []}
    assert exit_code(report | {"unmeasured": ""}) == 0
    assert exit_code(report | {"unmeasured": "the time was over"}) == 3


def test_no_case_too_large_for_a_host_is_made_to_choose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    case = Check.case

    def counted(self: Check):
        made.append(self.shape_class)
        return case(self)

    monkeypatch.setattr(Check, "case", counted)
    for op in operator_names():
        checks = Selection("cpu", ops=op, large=True).checks(op)
        if any(check.shape_class == "k3" for check in checks) and op not in ("rms_norm", "embed", "step_metadata"):
            continue  # they are made, which takes long for some
        chosen = measured_checks(checks)
        assert {check.sample.dtype for check in chosen} == {check.sample.dtype for check in checks}
    assert "device" not in made
