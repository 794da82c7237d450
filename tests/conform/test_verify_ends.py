"""What `conform verify` asks of end-to-end results: known models, each once, by numbers and a plan of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3hal.conform.package import plan_name, read_report
from k3hal.conform.verify import _plans
from k3hal.conform.verify_numbers import _ends
from k3hal.errors import InputError


def _end(**words: Any) -> dict[str, Any]:
    numbers = {"top1": 1.0, "kl_mean": 1e-9, "kl_max": 1e-8, "rms": 1e-5}
    end = {"preset": "nano", "dtype": "float32", "variant": "default", "status": "Pass", "problem": "", **numbers}
    end |= {"ran": [["linear", "cpu.native"]], **words}
    return {"plan": plan_name(end["preset"], end["dtype"], end["variant"]), **end}


def _said(*ends: dict[str, Any], quick: bool = False) -> list[str]:
    return list(_ends({"selection": {"quick": quick}, "end_to_end": ends}))


def test_results_within_their_caps_are_no_reason() -> None:
    rounded = _end(preset="nano-mxfp8", kl_max=0.01)
    old = {key: value for key, value in _end(plan="plan.json", dtype="bfloat16").items() if key != "variant"}
    assert _said(_end(), _end(variant="choice 2"), rounded, _end(preset="nano-int4"), old) == []


@pytest.mark.parametrize(
    ("words", "quick", "said"),
    [
        ({"preset": "foo"}, False, "expected one of nano, kl-tiny"),
        ({"preset": "foo", "status": "Crash", "problem": "x"}, False, "expected one of nano, kl-tiny"),
        ({"dtype": "float16"}, False, "expected one of nano, kl-tiny"),
        ({"preset": "nano-mxfp8"}, True, "expected one of nano in one of float32, bfloat16"),
        ({"preset": "nano-mxfp8", "plan": "plan-nano-float32.json"}, False, "expected plan-nano-mxfp8-float32.json"),
        ({"plan": "plan.json"}, False, "without its plan"),
        ({"status": "Weird", "problem": "x"}, False, "expected one of Pass"),
        ({"top1": 2.0}, False, "top1 is 2.0"),
        ({"kl_max": 0.01}, False, "its numbers do not make it so"),
    ],
)
def test_what_is_not_as_a_run_leaves_it_is_a_reason(words: dict[str, Any], quick: bool, said: str) -> None:
    found = _said(_end(**words), quick=quick)
    assert len(found) == 1 and said in found[0], found


def test_a_result_that_is_there_twice_is_a_reason() -> None:
    (reason,) = _said(_end(), _end())
    assert "nano in float32: there are two results" in reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kl_max": None}, "end_to_end 0: some of top1, kl_mean, kl_max, rms are null, expected all or none"),
        ({"ran": [7]}, "'ran' holds 7, expected an operator and a provider"),
        ({"ran": [[["x"], "y"]]}, "'ran' holds"),
        ({"plan": 3}, "'plan' is int"),
        ({"variant": [7]}, "'variant' is list"),
    ],
)
def test_what_is_malformed_is_one_line(package: Path, change: dict[str, Any], said: str) -> None:
    report = json.loads((package / "report.json").read_text("utf-8"))
    (package / "report.json").write_text(json.dumps(report | {"end_to_end": [_end() | change]}), "utf-8")
    with pytest.raises(InputError, match="end_to_end 0") as raised:
        read_report(package)
    assert said in raised.value.message


def _saved(package: Path, ran: list[list[str]]) -> dict[str, Any]:
    """A result whose plan, in the package, is the package's own."""
    end = _end(ran=ran)
    (package / end["plan"]).write_bytes((package / "plan.json").read_bytes())
    return end


def test_what_ran_is_what_the_plan_says(package: Path) -> None:
    entries = json.loads((package / "plan.json").read_text("utf-8"))["entries"]
    ran = {(e["op"], e["provider"]) for e in entries}
    parts = [part for e in entries for part in e["parts"].items()]
    for op, part in parts:
        ran.add((op, part["provider"]))
        parts += part["parts"].items()
    end = _saved(package, [list(pair) for pair in sorted(ran)])
    assert list(_plans(package, {"end_to_end": [end]})) == []
    for other in (end["ran"][1:], [*end["ran"], ["linear", "cpu.imagined"]]):
        (reason,) = _plans(package, {"end_to_end": [end | {"ran": other}]})
        assert "nano in float32: what ran is not what plan-nano-float32.json says" in reason


def test_a_plan_of_no_result_is_a_reason(package: Path) -> None:
    _saved(package, [])
    assert list(_plans(package, {"end_to_end": []})) == ["plan-nano-float32.json belongs to no end-to-end check"]
