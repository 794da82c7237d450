"""Levels, waivers, differences of packages, and the table made of committed reports."""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from k3hal.cli import main
from k3hal.conform.diff import compare_reports
from k3hal.conform.levels import level_rows, overall
from k3hal.conform.package import read_report
from k3hal.conform.result import CheckResult, ResultStatus
from k3hal.conform.run import exit_code
from k3hal.conform.sources import source_hash
from k3hal.conform.waivers import Waiver, apply_waivers, read_waivers
from k3hal.debug.verdict import TensorNumbers
from k3hal.dispatch.evidence import level_of
from k3hal.dispatch.registry import default_registry, operator_names
from k3hal.errors import InputError

from .conftest import edit

ROOT = Path(__file__).resolve().parents[2]
TODAY = datetime.date(2027, 1, 15)


def _result(status: ResultStatus, case: str = "a", dtype: str = "float32", kind: str = "sample") -> CheckResult:
    tensors = (TensorNumbers("out", "matmul", "Pass"),) if status != "Crash" else ()
    name = f"silu_and_mul-{case}-{dtype}"
    return CheckResult("silu_and_mul", "x.y", dtype, "tiny", "any", name, kind, status, tensors=tensors)


@pytest.mark.parametrize(
    ("statuses", "options", "level"),
    [
        ([], {}, "E0"),
        (["Crash"], {}, "E0"),
        (["Crash", "Pass"], {}, "E1"),
        (["Fail"], {}, "E1"),
        (["Waived", "Pass"], {}, "E1"),
        (["Pass", "QualityWarning", "NotSupported"], {}, "E3"),
        (["Pass"], {"quick": True, "end_to_end": {"float32"}}, "E2"),
        (["Pass"], {"end_to_end": {"bfloat16"}}, "E3"),
        (["Pass"], {"end_to_end": {"float32"}}, "E4"),
        (["Fail", "Pass"], {"end_to_end": {"float32"}, "measured": {"float32"}}, "E1"),
        (["Pass"], {"measured": {"float32"}}, "E3"),
        (["Pass"], {"end_to_end": {"float32"}, "measured": {"float32"}}, "E5"),
    ],
)
def test_a_level_is_what_the_checks_prove(statuses: list[ResultStatus], options: dict[str, Any], level: str) -> None:
    assert overall(level_rows([_result(status) for status in statuses], **options)) == level


def test_the_lowest_row_is_the_providers_level() -> None:
    rows = level_rows([_result("Pass"), _result("Fail", dtype="bfloat16")], end_to_end={"float32"})
    assert [(row["dtype"], row["level"]) for row in rows] == [("bfloat16", "E1"), ("float32", "E4")]
    assert overall(rows) == "E1"


def _waiver(case: str = "silu_and_mul-a-*", expires: datetime.date = TODAY, **more: str) -> Waiver:
    return Waiver("silu_and_mul", "x.y", case, "https://example.org/1", expires, **more)


@pytest.mark.parametrize(
    ("waiver", "statuses", "after", "problem"),
    [
        (_waiver(), ["Fail"], ["Waived"], ""),
        (_waiver(), ["Crash"], ["Waived"], ""),
        (_waiver(expires=TODAY - datetime.timedelta(1)), ["Fail"], ["Fail"], "expired on 2027-01-14"),
        (_waiver(), ["Fail", "Pass"], ["Waived", "Pass"], "unexpected pass: silu_and_mul-a-float32"),
        (_waiver("silu_and_mul-b-*"), ["Fail"], ["Fail"], "matches no check"),
        (_waiver(kind="invariant:*"), ["Fail"], ["Fail"], "matches no check"),
        (_waiver(), ["NotSupported"], ["NotSupported"], "matches no check"),
    ],
)
def test_waivers_are_strict(waiver: Waiver, statuses: list[ResultStatus], after: list[str], problem: str) -> None:
    results, entries = apply_waivers([_result(s) for s in statuses], [waiver], ["silu_and_mul"], TODAY, whole=True)
    assert [result.status for result in results] == after
    assert entries[0]["problem"] == problem
    report = {"checks": [r.to_json() for r in results], "end_to_end": [], "waivers": entries}
    assert exit_code(report) == (1 if problem else 0)


def test_waivers_of_operators_that_did_not_run_are_left_alone() -> None:
    assert apply_waivers([], [_waiver()], ["rms_norm"], TODAY, whole=True) == ([], [])
    assert apply_waivers([], [_waiver()], ["silu_and_mul"], TODAY, whole=False)[1][0]["problem"] == ""


GOOD = 'op = "silu_and_mul"\nprovider = "x.y"\ncase = "*"\nissue = "https://example.org/1"\nexpires = 2027-01-31\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[waiver]", "not TOML"),
        ('waiver = "all"', "it holds"),
        ("[other]\n", "holds other"),
        ("waiver = [1]", "waiver 1: not a table"),
        ("[[waiver]]\n", "waiver 1: 'op' is missing"),
        ("[[waiver]]\n" + GOOD.replace("silu_and_mul", "silu_and_mull"), "did you mean 'silu_and_mul'"),
        ("[[waiver]]\n" + GOOD + "reason = 'x'", "unknown key 'reason'"),
        ("[[waiver]]\n" + GOOD.replace("2027-01-31", '"2027-01-31"'), "a date without quotes"),
        ("[[waiver]]\n" + GOOD.replace("2027-01-31", "2027-01-31T00:00:00"), "a date without quotes"),
        ("[[waiver]]\n" + GOOD.replace('"*"', "3"), "case is 3, not a text"),
        ("[[waiver]]\n" + GOOD.replace("https://", "see "), "the address of the issue"),
        ("[[waiver]]\n" + GOOD + "[[waiver]]\n" + GOOD, "waiver 2: a second one for x.y:*"),
        ("[[waiver]]\n\xff", "not UTF-8"),
    ],
)
def test_malformed_waivers_are_one_line_errors(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        read_waivers(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_waiver_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.toml").write_text("[[waiver]]\n" + GOOD, "utf-8")
    assert [w.expires for w in read_waivers(tmp_path / "cpu.toml")] == [datetime.date(2027, 1, 31)]


def test_committed_waivers_can_be_read() -> None:
    for path in (ROOT / "ci" / "expectations").glob("*.toml"):
        assert read_waivers(path), f"{path.name} is empty: remove it"


def test_a_package_does_not_differ_from_itself(broken_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "diff", str(broken_package), str(broken_package)]) == 0
    assert capsys.readouterr().out == "0 changes, 0 lost\n"


def test_what_was_lost_and_what_moved_is_found(
    broken_package: Path, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def worsen(report: dict[str, Any]) -> None:
        mine = [c for c in report["checks"] if c["provider"] == "broken.right" and c["status"] == "Pass"]
        mine[0]["status"] = "Fail"
        for tensor in mine[-1]["tensors"]:
            tensor["peak"] = 0.01
        next(p for p in report["providers"] if p["provider"] == "broken.right")["level"] = "E1"

    edit(package, worsen)
    assert main(["conform", "diff", str(broken_package), str(package), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    found = {(change["what"], change["lost"]) for change in said["changes"]}
    assert found == {("level", True), ("status", True), ("number", False)}
    assert said["lost"] == 2
    assert main(["conform", "diff", str(package), str(broken_package)]) == 0, "gains are no loss"


def test_across_machines_the_best_providers_are_compared(broken_package: Path, package: Path) -> None:
    def elsewhere(report: dict[str, Any]) -> None:
        report["device"] |= {"vendor": "amd", "arch": "gfx950"}
        for part in ("providers", "checks"):
            for one in report[part]:
                one["provider"] = one["provider"].replace("broken.", "amd.")

    edit(package, elsewhere)
    assert compare_reports(read_report(broken_package), read_report(package)) == []


def test_a_source_hash_covers_helpers_and_kernels_and_nothing_else() -> None:
    providers = {(p.op, p.id): p for p in default_registry().providers}
    hashes = {name: source_hash(provider) for name, provider in providers.items()}
    assert len({hashes["linear", "cpu.streamed"], hashes["rms_norm", "cpu.rows"], hashes["embed", "cpu.gather"]}) == 3
    assert all(len(value) == 64 for value in hashes.values())


def _support_table() -> Any:
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "ci" / "support_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(broken_package: Path, tmp_path: Path) -> Path:
    """A repository with one committed report of every sample, or so it says."""
    arch = json.loads((broken_package / "report.json").read_text("utf-8"))["device"]["arch"]
    place = tmp_path / "ci" / "reports" / "cpu" / arch
    shutil.copytree(broken_package, place)
    edit(place, lambda report: report["selection"].update(quick=False))
    support = _support_table()
    (tmp_path / "README.md").write_text(f"# X\n\n{support.BEGIN}\n{support.END}\nmore\n", "utf-8")
    (tmp_path / "dispatch").mkdir()
    return tmp_path


def test_the_table_and_the_levels_come_from_the_reports(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    support = _support_table()
    assert support.main(["--check"], repository) == 1
    assert support.main(["--write"], repository) == 0
    assert support.main(["--check"], repository) == 0
    page = (repository / "README.md").read_text("utf-8")
    assert "| `silu_and_mul` | E2 `broken.right`" in page and page.endswith("more\n")
    assert "| `rms_norm` | not judged |" in page
    levels = json.loads((repository / "dispatch" / "evidence.json").read_text("utf-8"))["levels"]
    assert list(levels["silu_and_mul"]["broken.right"].values()) == ["E2"]
    assert "changed" not in capsys.readouterr().out


def test_a_provider_that_changed_since_its_report_is_named(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def age(report: dict[str, Any]) -> None:
        report["providers"][0]["source_hash"] = "0" * 64

    edit(next((repository / "ci" / "reports" / "cpu").iterdir()), age)
    support = _support_table()
    support.main(["--write"], repository)
    assert support.main(["--check"], repository) == 0
    assert "has changed since" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("statement", {"dirty": True}, "no commit holds"),
        ("statement", {"commit": ""}, "no commit holds"),
        ("selection", {"quick": True}, "quick subset"),
        ("device", {"arch": "riscv64"}, "move it"),
    ],
)
def test_a_report_that_proves_nothing_is_refused(
    repository: Path, part: str, changes: dict[str, Any], message: str
) -> None:
    edit(next((repository / "ci" / "reports" / "cpu").iterdir()), lambda report: report[part].update(changes))
    with pytest.raises(InputError, match=message):
        _support_table().main(["--check"], repository)


def test_an_emulated_machine_may_be_judged_quickly_and_is_marked(repository: Path) -> None:
    def emulated(report: dict[str, Any]) -> None:
        report["selection"]["quick"] = True
        report["device"]["features"] = ["emulated"]

    edit(next((repository / "ci" / "reports" / "cpu").iterdir()), emulated)
    assert _support_table().main(["--write"], repository) == 0
    page = (repository / "README.md").read_text("utf-8")
    assert "E2 `broken.right` *emulated*" in page and ", emulated on a CPU" in page


def test_the_packaged_levels_are_readable() -> None:
    assert level_of("no_such_operator", "cpu.native", "x86_64") == "E0"
    assert {level_of(op, "reference", "x86_64") for op in operator_names()} == {"E0"}
