"""What `bench dump` reports; how much a step costs, no test asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.bench import dump
from k3hal.bench.dump import CONTROL, UNARMED, Arms
from k3hal.debug.dump_spec import parse_dump
from k3hal.debug.record import Recorder
from k3hal.debug.step_trail import LENGTH, StepTrail
from k3hal.dispatch.observe import Step
from k3hal.model.batch import CacheViews, StepBatch
from k3hal.model.k3 import K3Model

Bench = Callable[..., tuple[int, str, str]]


def test_the_report(bench: Bench, k3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "LIMIT", 1e9)
    threads, target = torch.get_num_threads(), tmp_path / "report.json"
    code, out, _ = bench("dump", k3_dir, "--dtype", "float32", "--concurrency", "1,3", "--json", "--save", target)
    report = json.loads(out)
    assert code == 0 and report["schema"] == "k3hal.bench_dump/1" and report["within_limit"] is True
    assert json.loads(target.read_text()) == report
    assert report["machine"]["threads"] == 1 and torch.get_num_threads() == threads
    assert [result["concurrency"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert list(result["arms"]) == [UNARMED, CONTROL, "step:N", "nonfinite"]
        assert all(arm["step"]["min"] > 0 and arm["ratio"]["min"] > 0 for arm in result["arms"].values())
        assert result["arms"][UNARMED]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_over_the_limit_is_a_failure_and_a_table(
    bench: Bench, k3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "LIMIT", 0.0)
    page = tmp_path / "page.md"
    code, out, _ = bench("dump", k3_dir, "--dtype", "float32", "--concurrency", "2", "--save", page)
    assert code == 1 and "nonfinite" in out and "2 rounds of 16 steps" in out
    assert page.read_text().startswith("<!-- table: dump k3-micro float32 -->")


def test_each_block_pays_for_one_copy_and_only_its_arm_is_told(
    bench: Bench, k3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    copies: list[int] = []
    stepping, copy = Arms.stepping, StepTrail._copy

    def noted(self: Arms, step: Step) -> None:
        told.append(self.on)
        stepping(self, step)

    def copied(self: StepTrail, step: Step) -> None:
        copies.append(len(told))
        copy(self, step)

    monkeypatch.setattr(Arms, "stepping", noted)
    monkeypatch.setattr(StepTrail, "_copy", copied)
    bench("dump", k3_dir, "--dtype", "float32", "--concurrency", "2")
    rounds = 1 + 2
    assert told.count("nonfinite") == rounds * LENGTH == told.count("step:N") == told.count(CONTROL)
    assert len(copies) == rounds
    assert {told[at - 1] for at in copies} == {"nonfinite"}


def test_results_that_are_not_finite_measure_nothing(
    bench: Bench, k3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = K3Model.forward

    def broken(self: K3Model, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        return forward(self, batch, cache, aux_layers) * torch.inf

    monkeypatch.setattr(K3Model, "forward", broken)
    code, out, err = bench("dump", k3_dir, "--dtype", "float32", "--concurrency", "1")
    assert (code, out) == (2, "") and "sequences ended during the measurement" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--concurrency", "0"], "--concurrency needs"), (["--prompt-tokens", "0"], "--prompt-tokens is 0")],
)
def test_bad_sizes_are_one_line(bench: Bench, k3_dir: Path, args: list[str], message: str) -> None:
    code, out, err = bench("dump", k3_dir, *args)
    assert code == 4 and out == "" and message in err


def test_an_arm_that_wraps_nothing_binds_the_function_itself(tmp_path: Path) -> None:
    def fn() -> None: ...

    recorder = Recorder(parse_dump(f"ops=mla_*,when=nonfinite,dir={tmp_path}"))
    decision: Any = type("Decided", (), {"call": type("Call", (), {"op": "embed"})})
    place: Any = type("At", (), {"op": "embed"})
    assert Arms({"nonfinite": recorder}).bound(place, decision, fn) is fn
