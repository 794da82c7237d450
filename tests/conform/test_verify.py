"""`conform verify` takes an untouched package and rejects every altered one; malformed ones are one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.cli import main
from k3hal.conform.sources import source_hash
from k3hal.conform.verify import notes, verify
from k3hal.dispatch.registry import default_registry
from k3hal.errors import InputError

from .conftest import edit

Report = dict[str, Any]


def test_an_untouched_package_is_verified(broken_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its failures are reported, which is no reason to reject it."""
    assert main(["conform", "verify", str(broken_package)]) == 0, capsys.readouterr().out


def _sample(report: Report, provider: str, status: str = "Pass") -> Report:
    return next(c for c in report["checks"] if (c["provider"], c["status"]) == (f"broken.{provider}", status))


def _drop_provider(report: Report, name: str) -> None:
    for part in ("providers", "checks"):
        report[part] = [one for one in report[part] if one["provider"] != name]
    report["counts"] = {}
    for check in report["checks"]:
        report["counts"][check["status"]] = report["counts"].get(check["status"], 0) + 1


def _excuse(report: Report, check: Report) -> None:
    """Leave a sample out as if it were an invariant that does not apply."""
    report["checks"].remove(check)
    mine = next(one for one in report["providers"] if one["provider"] == check["provider"])
    mine["not_applicable"].append(f"{check['case']} {check['kind']}")


def _pass_with(**numbers: Any) -> Callable[[Report], Any]:
    """Change the first judged output that passed, and leave its status."""
    return lambda report: _sample(report, "right")["tensors"][0].update(numbers)


EDITS: list[tuple[str, Callable[[Report], Any], str]] = [
    ("dirty", lambda r: r["statement"].update(dirty=True), "the tree was dirty"),
    ("hash", lambda r: r["must_pass"].update(hash="0" * 64), "the must-pass list is not this k3hal's"),
    ("count", lambda r: r["must_pass"].update(count=3), "the must-pass list is not this k3hal's"),
    ("selection", lambda r: r["selection"].update(ops="sigmoid_gate"), "the must-pass list is not this k3hal's"),
    ("check_lost", lambda r: r["checks"].remove(_sample(r, "right")), "no result for silu_and_mul-"),
    ("check_twice", lambda r: r["checks"].append(_sample(r, "right")), "has two results"),
    ("check_foreign", lambda r: _sample(r, "right").update(case="easy"), "not in the must-pass list"),
    ("unknown", lambda r: _sample(r, "right").update(provider="broken.other"), "which is not among the providers"),
    ("cap", lambda r: r["policy"]["classes"]["matmul"].update(tensor=0.3), "the tolerance class matmul differs"),
    ("class_lost", lambda r: r["policy"]["classes"].pop("exact"), "the tolerance class exact differs"),
    ("policy_hash", lambda r: r["policy"].update(hash="0" * 64), "the policy's hash differs"),
    ("counts", lambda r: r["counts"].update(Pass=1000), "the counts do not add up"),
    ("level", lambda r: r["providers"][1].update(level="E4"), "says E4, its checks prove E"),
    ("row", lambda r: r["providers"][0]["levels"][0].update(level="E4"), "its checks prove E"),
    ("passed", lambda r: _sample(r, "late_row", "Fail").update(status="Pass", problems=[]), "make it Fail"),
    ("provider", lambda r: _drop_provider(r, "broken.late_row"), "broken.late_row of silu_and_mul is not listed"),
    ("outside", lambda r: _sample(r, "late_row", "Fail").update(case_file="../x.k3case"), "lies outside the package"),
    ("no_case", lambda r: _sample(r, "late_row", "Fail").update(case_file="cases/no.k3case"), "cannot be read"),
    *((f"{n}_edited", _pass_with(**{n: 0.9}), "out of tolerance") for n in ("tensor", "slice", "peak")),
    ("ratio", _pass_with(floor=1e-5, tensor=9e-6, slice=9e-6, peer=1e-12), "looser than the policy's"),
    ("looser", _pass_with(tensor=0.9, caps={"tensor": 1.0, "slice": 1.0, "peak": 1.0}), "looser than the policy's"),
    ("class", _pass_with(tolerance="matmul"), "which is not its class"),
    ("nothing_judged", lambda r: _sample(r, "right").update(tensors=[]), "with no output judged"),
    ("warned", lambda r: _sample(r, "right").update(status="QualityWarning"), "make it Pass"),
    ("no_reason", lambda r: _sample(r, "right", "NotSupported").update(problems=[]), "says no reason"),
    ("waived", lambda r: _sample(r, "late_row", "Fail").update(status="Waived", waiver="w"), "is not listed"),
    ("seconds", lambda r: _sample(r, "right").update(seconds=-1.0), "seconds is -1.0"),
    ("excused", lambda r: _excuse(r, _sample(r, "right")), "no result for"),
]


@pytest.mark.parametrize(("change", "reason"), [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_an_altered_package_is_rejected(
    package: Path, change: Callable[[Report], Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(package, change)
    assert main(["conform", "verify", str(package)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(reason in line for line in lines), lines
    assert all(line.startswith("rejected: ") for line in lines)


@pytest.mark.parametrize("name", ["statement.md", "plan.json", "cases"])
def test_a_missing_or_foreign_file_is_rejected(package: Path, name: str) -> None:
    if name == "cases":
        for path in (package / "cases").iterdir():
            path.write_bytes(b"PK\x03\x04 and then nothing")
    else:
        (package / name).unlink()
    assert verify(package)


def test_a_file_of_no_check_is_rejected(package: Path) -> None:
    (package / "cases" / "extra.bin").write_bytes(b"x")
    assert verify(package) == ["cases/extra.bin belongs to no check"]


def test_seconds_that_are_not_finite_are_rejected(package: Path, report: Report) -> None:
    """JSON writes no infinity, but reads a number too large as one."""
    report["seconds"] = report["checks"][0]["seconds"] = 12345.5
    text = json.dumps(report).replace("12345.5", "1e999")
    (package / "report.json").write_text(text, "utf-8")
    assert sum("seconds is inf" in reason for reason in verify(package)) == 2


def test_a_report_without_caps_is_judged_by_the_loosest(package: Path) -> None:
    def older(report: Report, **numbers: float) -> None:
        for check in report["checks"]:
            for tensor in check["tensors"]:
                for newer in ("caps", "floor"):
                    tensor.pop(newer, None)
        _sample(report, "right")["tensors"][0].update(numbers)

    edit(package, older)
    assert verify(package) == []
    edit(package, lambda report: older(report, tensor=0.9))
    assert any("out of tolerance" in reason for reason in verify(package))


def _same_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("k3hal.conform.values.same_sources", lambda *_: True)


def _floor(report: Report, floor: float, peer: float | None = None) -> None:
    """Of the bf16 sample that passed; with a peer so good that the floor judges."""
    check = next(
        c for c in report["checks"]
        if (c["provider"], c["status"], c["kind"], c["dtype"]) == ("broken.raises", "Pass", "sample", "bfloat16")
    )  # fmt: skip
    check["tensors"][0].update(floor=floor, **({} if peer is None else {"peer": peer}))


RAISED, TOO_HIGH = 0.0036, 0.0041
"""Floors of a bf16 output: above the class's 0.0017 and what its values explain, the second above any values'."""


def test_a_floor_is_derived_anew_where_values_are_the_report_s(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _same_sources(monkeypatch)
    assert verify(package) == [] and not any("bounded" in note for note in notes(package))
    edit(package, lambda report: _floor(report, RAISED))
    (reason,) = verify(package)
    assert "floor 0.0036, looser than the policy's" in reason
    assert not any("bounded" in note for note in notes(package))


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ({"torch": "2.11.0+cu130"}, "torch 2.11.0 there"),
        ({"torch": ""}, "torch one not known there"),
        ({"cpu": "riscv64 DEFAULT"}, "CPU riscv64 DEFAULT there"),
        ({}, "the operators' sources are not those of the package's commit"),
    ],
)
def test_a_floor_of_another_machine_is_bounded(
    package: Path, versions: Report, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random values differ between versions of torch, and so does what rounding them costs."""
    if versions:
        _same_sources(monkeypatch)
    edit(package, lambda report: _floor(report, RAISED))
    edit(package, lambda report: report["versions"].update(versions))
    assert main(["conform", "verify", str(package)]) == 0
    said = capsys.readouterr().err
    assert "floors and caps of " in said and " outputs bounded, not re-derived: " in said and why in said
    edit(package, lambda report: _floor(report, TOO_HIGH, peer=1e-9))
    assert main(["conform", "verify", str(package)]) == 1
    assert "floor 0.0041, looser than the policy's" in capsys.readouterr().out


def test_hashes_of_sources_are_compared_where_the_sources_are_the_report_s(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = next(p for p in default_registry().of("silu_and_mul") if p.backend == "cpu")

    def as_cpu(report: Report, digest: str) -> None:
        nothing = {"provider": provider.id, "backend": "cpu", "level": "E0", "levels": [], "refusals": []}
        report["providers"].append(report["providers"][0] | nothing | {"source_hash": digest})

    edit(package, lambda report: as_cpu(report, "0" * 64))
    assert not any("hash of its sources" in reason for reason in verify(package))
    assert main(["conform", "verify", str(package)]) == 1
    assert "hashes of providers' sources were not compared" in capsys.readouterr().err
    monkeypatch.setattr("k3hal.conform.verify.same_sources", lambda *_: True)
    assert f"{provider.id} of silu_and_mul: the hash of its sources is not that of the report's commit" in verify(
        package
    )
    edit(package, lambda report: report["providers"][-1].update(source_hash=source_hash(provider)))
    assert not any("hash of its sources" in reason for reason in verify(package))


def test_an_edited_statement_is_rejected(package: Path) -> None:
    path = package / "statement.md"
    path.write_text(path.read_text("utf-8").replace("E1", "E5"), "utf-8")
    assert verify(package) == ["statement.md is not the report's"]


def _raw(text: str) -> Callable[[Report], str]:
    return lambda _: text


def _without(key: str) -> Callable[[Report], str]:
    return lambda report: json.dumps({name: value for name, value in report.items() if name != key})


def _with(**changes: Any) -> Callable[[Report], str]:
    return lambda report: json.dumps(report | changes)


MALFORMED: list[tuple[str, Callable[[Report], str], str]] = [
    ("empty", _raw(""), "not JSON"),
    ("list", _raw("[]"), "no report"),
    ("nan", _raw('{"schema": NaN}'), "NaN is no JSON number"),
    ("deep", _raw("[" * 100_000), "not JSON"),
    ("other_schema", _with(schema="k3hal.op_plan/1"), "this version reads k3hal.conform/1"),
    ("newer_schema", _with(schema="k3hal.conform/2"), "this version reads k3hal.conform/1"),
    *((f"no_{key}", _without(key), f"{key!r} is missing") for key in ("statement", "checks", "counts", "policy")),
    ("statement", _with(statement=[]), "'statement' is list"),
    ("checks", _with(checks=[3]), "checks 0"),
    ("check", _with(checks=[{"op": "x"}]), "checks 0: 'provider' is missing"),
    ("providers", _with(providers=[{}]), "providers 0: 'op' is missing"),
    ("refusals", _with(providers=[{"op": 3}]), "'op' is int"),
    ("ends", _with(end_to_end=[None]), "end_to_end 0: not an object"),
    ("selection", lambda r: json.dumps(r | {"selection": {**r["selection"], "mood": 1}}), "selection cannot be read"),
    ("count", lambda r: json.dumps(r | {"must_pass": {"hash": "x", "count": True}}), "'count' is bool"),
]


@pytest.mark.parametrize(("make", "message"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_a_malformed_report_is_a_one_line_error(
    package: Path, report: Report, make: Callable[[Report], str], message: str
) -> None:
    (package / "report.json").write_text(make(report), "utf-8")
    with pytest.raises(InputError, match=r"report\.json|selection") as caught:
        verify(package)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_package_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "verify", str(tmp_path / "nowhere")]) == 4
    assert main(["conform", "diff", str(tmp_path), str(tmp_path)]) == 4
    (tmp_path / "report.json").write_bytes(b"\xff\xfe\x00")
    assert main(["conform", "verify", str(tmp_path)]) == 4
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
