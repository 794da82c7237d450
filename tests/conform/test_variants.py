"""The model run again with other providers, which is how those that are not the first choice are proven end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from k3hal.conform.end_to_end import end_to_end_isolated
from k3hal.conform.package import plan_name
from k3hal.conform.processes import Processes
from k3hal.conform.variants import variants
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.plan import DispatchPlan, make_plan
from k3hal.dispatch.probe import probe
from k3hal.model.config import ModelConfig
from k3hal.model.presets import preset_config
from k3hal.model.requests import model_requests


def _plan(ops: str | None) -> DispatchPlan:
    requests = model_requests(ModelConfig.from_json(preset_config("nano")), "float32", "float32")
    return make_plan(requests, build_selector(ops, "warn"), model="nano", device=probe("cpu"), dtype="float32")


def test_variants_take_other_providers_that_say_yes_and_compose_the_rest() -> None:
    default = _plan(None)
    found = dict(variants(default, build_selector(None, "warn")))
    assert "choice 2" in found and "composed" in found
    first = {e.request.op: e.decision.provider for e in default.entries}
    second = {e.request.op: e.decision.provider for e in _plan(found["choice 2"]).entries}
    named = dict(word.split("=") for word in found["choice 2"].split(","))
    assert named and all(second[op] == name != first[op] for op, name in named.items() if op in first)
    assert all(second[op] == first[op] for op in first if op not in named)
    composed = {e.request.op: e.decision for e in _plan(found["composed"]).entries}
    assert composed["kda_decode"].composed and composed["kda_prefill"].composed


def test_a_plan_without_alternatives_has_no_variants() -> None:
    plan = _plan("*=reference")
    assert "composed" not in dict(variants(plan, build_selector("*=reference", "warn")))


def test_a_crash_in_a_variant_is_its_result_and_what_was_done_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Crashing(Processes):
        def run(self, command: Sequence[str], job: str, timeout: float) -> tuple[int, str]:
            done = {"preset": "nano", "dtype": "float32", "status": "Pass", "ran": [["linear", "cpu.native"]]}
            said = {"done": [done], "left": [["float32", "choice 2"], ["bfloat16", "default"]]}
            Path(command[-1]).write_text(json.dumps(said), "utf-8")
            return -11, "segmentation fault"

    ends = end_to_end_isolated("nano", "cpu", None, 1, Crashing(), timeout=1.0, varied=True)
    assert [(e.dtype, e.variant, e.status) for e in ends] == [
        ("float32", "default", "Pass"), ("float32", "choice 2", "Crash"), ("bfloat16", "default", "Crash"),
    ]  # fmt: skip
    assert ends[0].ran == (("linear", "cpu.native"),) and "segmentation fault" in ends[1].problem
    assert len({plan_name(one.preset, one.dtype, one.variant) for one in ends}) == 3


def test_the_child_says_what_it_is_about_to_run(tmp_path: Path) -> None:
    """A whole run on the CPU: every variant passes, and none is left."""
    job = {"model": "nano", "device": "cpu", "ops": None, "threads": 1, "varied": True}
    result = tmp_path / "result.json"
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "k3hal.conform.end_to_end", str(result)]
    subprocess.run(command, input=json.dumps(job), text=True, check=True, capture_output=True)
    made = json.loads(result.read_text("utf-8"))
    assert made["left"] == []
    assert {(one["dtype"], one["variant"]) for one in made["done"]} >= {
        (dtype, variant) for dtype in ("float32", "bfloat16") for variant in ("default", "choice 2", "composed")
    }
    assert {one["status"] for one in made["done"]} == {"Pass"}, [one["problem"] for one in made["done"]]
