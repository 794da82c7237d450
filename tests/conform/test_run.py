"""A run: what providers do ends as a result, failures are kept as cases, and a package is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3hal.cli import main
from k3hal.conform.end_to_end import compare_logits
from k3hal.conform.models import CAPS, MODELS
from k3hal.conform.package import new_package
from k3hal.conform.suite import checks_of
from k3hal.debug.case_file import load_case
from k3hal.debug.check import check
from k3hal.debug.target import Target
from k3hal.dispatch.registry import default_registry, get_operator, operator_names
from k3hal.errors import InputError

OP = "silu_and_mul"


def _checks(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in report["checks"] if one["provider"] == f"broken.{name}"]


def _level(report: dict[str, Any], name: str) -> str:
    return next(one["level"] for one in report["providers"] if one["provider"] == f"broken.{name}")


def test_every_check_of_every_available_provider_has_a_result(report: dict[str, Any]) -> None:
    keys = {check.key for check in checks_of(get_operator(OP), quick=True)}
    for name in ("late_row", "raises", "deadly"):
        skipped = next(one["not_applicable"] for one in report["providers"] if one["provider"] == f"broken.{name}")
        assert {f"{one['case']} {one['kind']}" for one in _checks(report, name)} | set(skipped) == keys
    assert sum(report["counts"].values()) == len(report["checks"])
    assert report["must_pass"]["count"] == len(keys)


def test_a_right_provider_passes_and_its_no_is_recorded(report: dict[str, Any]) -> None:
    statuses = {(one["dtype"], one["status"]) for one in _checks(report, "right")}
    assert statuses == {("float32", "Pass"), ("bfloat16", "NotSupported")}
    assert all(one["problems"] == ["needs dtype float32, this is bfloat16"] for one in _checks(report, "right")
               if one["status"] == "NotSupported")  # fmt: skip
    assert _level(report, "right") == "E2"


def test_a_planted_fault_fails_with_a_case_that_replays(report: dict[str, Any], broken_package: Path) -> None:
    failed = [one for one in _checks(report, "late_row") if one["status"] == "Fail" and one["kind"] == "sample"]
    assert failed and _level(report, "late_row") == "E1"
    provider = next(p for p in default_registry().of(OP) if p.id == "broken.late_row")
    for one in failed:
        case = load_case(broken_package / one["case_file"])
        assert case.args["x"].shape[0] == 3, "shrunk to the first wrong row"
        assert check(case, Target.of(provider)).status == "Fail"
        assert check(case, Target.reference(get_operator(OP))).ok


def test_a_yes_that_raises_is_a_failure(report: dict[str, Any]) -> None:
    failed = [one for one in _checks(report, "raises") if one["status"] == "Fail"]
    assert failed and all("raised ValueError: seventeen rows" in one["problems"][0] for one in failed)


def test_a_crash_and_a_hang_are_results_and_not_the_end(report: dict[str, Any]) -> None:
    mine = _checks(report, "deadly")
    crashed = [one for one in mine if one["status"] == "Crash"]
    assert crashed and all("SIGSEGV" in one["problems"][0] for one in crashed)
    hung = [one for one in mine if one["status"] == "Timeout"]
    assert "did not end within 6 s" in hung[0]["problems"][0]
    assert any("not tried" in one["problems"][0] for one in hung[1:])
    assert any(one["status"] == "Pass" for one in mine)


def test_an_answer_that_changes_and_one_that_crashes_fail(report: dict[str, Any]) -> None:
    fickle = [one for one in _checks(report, "fickle") if one["dtype"] == "bfloat16"]
    assert fickle and all(one["problems"] == ["said No when first asked, now Yes"] for one in fickle)
    crashing = _checks(report, "crashing")
    assert crashing and all(one["status"] == "Fail" for one in crashing)
    assert all("supports() raised ZeroDivisionError" in one["problems"][0] for one in crashing)


def test_a_provider_that_is_not_available_is_listed_with_its_reasons(report: dict[str, Any]) -> None:
    never = next(one for one in report["providers"] if one["provider"] == "broken.never")
    assert (never["level"], never["levels"]) == ("E0", [])
    assert all("needs dtype float64" in refusal["reasons"][0] for refusal in never["refusals"])


def test_the_quick_run_of_this_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The must-pass subset of every CPU provider and the end-to-end check: what `make test` proves of the backend."""
    out = tmp_path / "package"
    code = main(["conform", "run", "--device", "cpu", "--quick", "--out", str(out), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (code, said["exit_code"]) == (0, 0), said["failures"]
    assert {one["op"] for one in said["providers"]} == set(operator_names())
    report = json.loads((out / "report.json").read_text("utf-8"))
    judged = [one for one in report["providers"] if one["levels"]]
    assert {one["level"] for one in judged} == {"E2"}
    assert {one["op"] for one in judged} == {p.op for p in default_registry().providers if p.backend == "cpu"}
    assert [one["status"] for one in said["end_to_end"]] == ["Pass", "Pass"]
    ran = {op for one in report["end_to_end"] for op, _ in one["ran"]}
    assert {"kda_prefill", "kda_decode", "mla_prefill", "mla_decode", "kda_commit", "sample", "copy_pages"} <= ran
    main(["conform", "verify", str(out), "--json"])
    reasons = json.loads(capsys.readouterr().out)["reasons"]
    assert [reason for reason in reasons if "dirty" not in reason] == []


def test_some_operators_alone_run_the_models_where_that_is_asked_for(tmp_path: Path) -> None:
    """What a checkpoint of int4 and an option for activations call is proven in a model too."""
    out = tmp_path / "package"
    flags = ["--op", "moe_experts_a8w4", "--no-end-to-end"]
    assert main(["conform", "run", "--device", "cpu", *flags, "--quick", "--out", str(out)]) == 0
    assert json.loads((out / "report.json").read_text("utf-8"))["end_to_end"] == []
    flags[-1] = "--end-to-end"
    assert main(["conform", "run", "--device", "cpu", *flags, "--out", str(out)]) == 0
    report = json.loads((out / "report.json").read_text("utf-8"))
    ran: dict[str, set[str]] = {}
    for one in report["end_to_end"]:
        assert one["status"] == "Pass", one
        ran.setdefault(one["preset"], set()).update(op for op, _ in one["ran"])
    assert set(ran) == set(MODELS)
    assert "moe_experts_a8w4" in ran["nano-mxfp8"] and "moe_experts_int4" in ran["nano-int4"]
    (rounded,) = [one for one in report["providers"] if one["provider"] == "cpu.rounded"]
    assert rounded["level"] == "E4"


def test_nothing_is_overwritten_and_nothing_left_half_written(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", "utf-8")
    with pytest.raises(InputError, match="is no package"), new_package(tmp_path / "mine"):
        pass
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(InputError, match="no folder"), new_package(tmp_path / "file"):
        pass
    with pytest.raises(ZeroDivisionError):
        _half_written(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
    for text in ("first", "second"):
        with new_package(tmp_path / "new") as folder:
            (folder / "report.json").write_text(json.dumps({"schema": "k3hal.conform/1", "text": text}), "utf-8")
    assert json.loads((tmp_path / "new" / "report.json").read_text("utf-8"))["text"] == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "new"]


def _half_written(out: Path) -> None:
    with new_package(out) as folder:
        (folder / "report.json").write_text("{}", "utf-8")
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "flags", [["--jobs", "-1"], ["--timeout", "0"], ["--op", "nothing_*"], ["--backend", "nobody"], ["--waivers", "no"]]
)
def test_a_mistake_is_one_line(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "run", "--device", "cpu", "--quick", "--out", str(tmp_path / "out"), *flags]) == 4
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_logits_that_differ_or_are_not_finite_fail() -> None:
    import torch

    good = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    same = compare_logits(good, good, CAPS["float32"])
    assert (same["status"], same["top1"], same["rms"]) == ("Pass", 1.0, 0.0)
    worse = compare_logits(good + 0.1 * good.flip(0), good, CAPS["bfloat16"])
    assert worse["status"] == "Fail" and "kl_mean" in worse["problem"]
    good[0, 0] = torch.nan
    assert compare_logits(good, good, CAPS["float32"])["status"] == "Fail"
