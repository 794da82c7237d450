"""`k3hal doctor` reports facts, and reports a broken machine instead of failing on it."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal import doctor as facts
from k3hal.cli import main
from k3hal.dispatch import probe_vendors
from k3hal.dispatch.registry import operator_names


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "k3hal.doctor/1"
    assert report["torch"]["version"] == torch.__version__
    assert report["devices"][-1]["device"] == "cpu"
    assert 0 < report["machine"]["memory_available"] <= report["machine"]["memory_total"]
    assert report["machine"]["threads"] >= 1
    assert report["problems"] == []
    plan = report["would_run"]
    assert plan["device"] == report["devices"][0]["device"]
    assert set(plan["operators"]) <= set(operator_names())
    assert "rms_norm" in plan["operators"]


def test_text_report_shows_each_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    labels = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    wanted = {"k3hal", "system", "cpu", "isa", "memory", "python", "torch", "device", "cache", "packages", "runs"}
    assert labels == wanted


def test_what_would_run_follows_the_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K3HAL_OPS", "rms_norm=reference")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["would_run"]["operators"]["rms_norm"] == "reference"


def test_a_torch_that_does_not_import_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def broken(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise OSError("libgomp.so.1: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert main(["doctor"]) == 1
    assert "problem   import torch failed: libgomp.so.1" in capsys.readouterr().out


def test_a_driver_that_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(kind: str) -> Any:
        raise probe_vendors.ProbeError(f"probing {kind} devices failed")

    monkeypatch.setattr(probe_vendors, "devices", silent)
    assert main(["doctor"]) == 1
    assert "problem   probing cuda devices failed" in capsys.readouterr().out


def test_an_override_that_cannot_be_met_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K3HAL_OPS", "rms_norm=no_such_provider")
    assert main(["doctor"]) == 1
    assert "problem   K3HAL_OPS: no provider is called 'no_such_provider'" in capsys.readouterr().out


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "_REQUIRED", ("torch", "no-such-distribution"))
    assert main(["doctor"]) == 1
    assert "problem   package no-such-distribution is not installed" in capsys.readouterr().out


def test_the_memory_of_a_model(nano_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--max-model-len", "1000", "--max-num-seqs", "3"]
    assert main(["doctor", str(nano_dir), *sizes, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["model"], memory["device"], memory["max_model_len"]) == (nano_dir.name, "cpu", 1000)
    assert [item["item"] for item in memory["items"]] == ["weights", "cache", "workspace", "buffers"]
    assert {item["known"] for item in memory["items"]} == {"computed"}
    assert memory["total"] == sum(item["bytes"] for item in memory["items"]) < memory["budget"] < memory["free"]
    assert main(["doctor", str(nano_dir), *sizes]) == 0
    shown = capsys.readouterr().out
    assert f"memory of {nano_dir.name} on cpu: " in shown
    assert {"weights", "cache", "workspace", "buffers"} <= {
        line.split()[0] for line in shown.splitlines() if line.strip()
    }


def test_a_model_that_does_not_fit_is_a_problem(nano_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(nano_dir), "--device", "cpu", "--memory-budget", "0.01", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["memory"] is None
    assert "GB are missing" in report["problems"][0]
    assert "--memory-budget" in report["problems"][0]


def test_experts_that_cannot_round_are_a_problem(nano_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cpu", "--expert-activations", "mxfp8", "--json"]
    assert main(["doctor", str(nano_dir), *asked]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["model"] == nano_dir.name
    assert main(["doctor", "random:kl-tiny", *asked]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["memory"] is None and "mxfp8 needs experts in mxfp4" in report["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--expert-activations", "mxfp8"], "--expert-activations is given without a MODEL"),
        (["--max-num-seqs", "3"], "--max-num-seqs is given without a MODEL"),
        (["/nowhere"], "'/nowhere' is not a directory"),
        (["MODEL", "--max-num-seqs", "0"], "max-num-seqs"),
        (["MODEL", "--device", "gpu"], "unknown device 'gpu'"),
        (["MODEL", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "below max_num_seqs 9"),
    ],
)
def test_a_model_or_sizes_that_are_none_are_bad_input(
    nano_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [str(nano_dir) if word == "MODEL" else word for word in arguments]
    assert main(["doctor", *given]) == 4
    shown = capsys.readouterr()
    assert message in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
