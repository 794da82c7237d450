"""`op bench`: verified before timed, against ceilings measured in the same run, drawn on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.bench.operators import operator_tables, operators_report
from k3hal.cli import main, op_bench
from k3hal.debug import bench, bench_run, ceilings
from k3hal.debug.bench import bench_cases
from k3hal.debug.case import Case
from k3hal.debug.ceilings import Ceilings
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.probe import probe

MakeCase = Callable[..., Case]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings in milliseconds instead of a second."""
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "MATMUL", {"cpu": 64})


def _json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert main(["op", "bench", *args, "--device", "cpu", "--seconds", "0.02", "--json"]) == code
    return json.loads(capsys.readouterr()[0])


def test_rates_follow_from_cost_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, "rms_norm", "--sample", "plain", "--dtype", "float32")
    assert data["schema"] == "k3hal.op_bench/1"
    limits = data["ceilings"]["float32"]
    ran = [row for row in data["results"] if row["status"] != "NotSupported"]
    assert {row["provider"] for row in ran} >= {"cpu.rows", "reference"}
    for row in ran:
        assert row["status"] == "Pass"
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
        least = max(row["flops"] / limits["flops_per_s"], row["bytes"] / limits["bytes_per_s"])
        assert row["roofline"] == pytest.approx(least / row["seconds"])
        assert row["spread"] >= 1


def test_an_output_that_fails_is_never_timed(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("rms_norm", "plain", "float32")
    wrong = Verdict("rms_norm", "cpu.rows", case.id, "Fail", ("wrong",))
    monkeypatch.setattr(bench, "check", lambda *args, **kwargs: wrong)
    monkeypatch.setattr(bench, "host_seconds", lambda *args: pytest.fail("it was timed"))
    (timing,) = bench_cases([case], ["cpu"], probe("cpu"), {"float32": Ceilings(1e9, 1e9, "float32", 1)}, 0.01)
    assert timing.seconds is None
    assert timing.to_json()["seconds"] is None


def test_a_wrong_output_is_timed_where_that_is_asked_for(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("rms_norm", "plain", "float32")
    monkeypatch.setattr(bench, "check", lambda *_, **__: Verdict("rms_norm", "cpu.rows", case.id, "Fail", ("wrong",)))
    limits = {"float32": Ceilings(1e9, 1e9, "float32", 1)}
    (timing,) = bench_cases([case], ["cpu"], probe("cpu"), limits, 0.01, failing=True)
    assert timing.seconds and timing.verdict.status == "Fail" and "Fail: wrong" in op_bench._line(timing)
    report = operators_report("rms_norm", probe("cpu"), limits, [timing])
    assert report["results"][0]["status"] == "Fail"
    assert "it fails: wrong" in operator_tables(report)[0].markdown()


def test_a_tactic_of_another_operator_is_a_row() -> None:
    key = ("rms_norm", "plain", "float32", "cpu.rows:warps4")
    (timing,) = bench_run.run_here(bench_run.BenchJob((key,), "cpu", 0.01), lambda _: None).timings
    assert timing.verdict.status == "NotSupported" and "warps4" in timing.verdict.problems[0]


def test_the_table_shows_the_share_of_the_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "op",
        "bench",
        "silu_and_mul",
        "--tag",
        "tiny",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--seconds",
        "0.02",
    ]
    assert main(args) == 0
    first, *rows = capsys.readouterr()[0].splitlines()
    assert "measured now" in first
    assert rows
    assert all("% of the roofline" in row for row in rows)


def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs k3hal[plot]")
    data = _json(capsys, "rms_norm", "--sample", "plain", "--plot", str(tmp_path / "roof"))
    png, svg = map(Path, data["plots"])
    assert png.read_bytes().startswith(b"\x89PNG")
    said = svg.read_text("utf-8")
    assert "<svg" in said
    case, share = data["results"][0], f"{100 * data['results'][0]['roofline']:.1f}"
    for words in (case["case"].partition("-")[2], case["provider"], share, "float32 matmul", "copy ", "FLOPs per byte"):
        assert words in said, words
    assert main(["op", "bench", "embed", "--sample", "repeats", "--device", "cpu", "--plot", str(tmp_path / "x")]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("rms_norm", "--seconds", "0"), "--seconds is 0"),
        (("rms_norm", "--provider", "cpuu", "--sample", "plain"), "no provider is called 'cpuu'"),
        (("rms_nrom",), "unknown operator"),
        (("s*_and_mul", "--provider", "in_place,indexd"), "none of these operators has a provider 'indexd'"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    assert main(["op", "bench", *args, "--device", "cpu", "--json"]) == 4
    _, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1


def test_several_operators_at_once_and_their_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept, page = tmp_path / "ops.json", tmp_path / "bench.md"
    args = ["s*_and_mul", "--tag", "tiny", "--dtype", "float32", "--save", str(kept), "--save", str(page)]
    data = _json(capsys, *args, "--provider", "reference,in_place")
    ran = {(row["op"], row["provider"]) for row in data["results"]}
    assert ran == {(op, p) for op in ("silu_and_mul", "situ_and_mul") for p in ("reference", "cpu.in_place")}
    assert json.loads(kept.read_text("utf-8"))["results"] == data["results"]
    mixed = _json(capsys, "situ_and_mul,mla_cache_insert", *args[1:5], "--provider", "in_place,cpu.indexed")
    assert {(row["op"], row["provider"], row["status"]) for row in mixed["results"]} == {
        ("situ_and_mul", "cpu.in_place", "Pass"), ("mla_cache_insert", "cpu.indexed", "Pass"),
    }  # fmt: skip
    text = page.read_text("utf-8")
    assert "| case | provider | us | of floor | of copy | of matmul |" in text
    assert all(f"| {op} tiny-float32 | cpu.in_place |" in text for op, _ in ran)
    assert main(["op", "bench", "x*", "--device", "cpu"]) == 4
    assert main(["op", "bench", "rms_norm", "--cache", "cold", "--device", "cpu"]) == 4


def test_what_dies_or_hangs_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a script that stands for the worker: the second of three keys ends it, in the way its name says."""
    script = (
        "import json, os, sys, time\n"
        "for op, name, dtype, p in json.load(sys.stdin)['keys']:\n"
        "    if name == 'dies': sys.exit('out of luck')\n"
        "    if name == 'hangs': time.sleep(60)\n"
        "    print(json.dumps({'left_out': [op, name, dtype, p]}), flush=True)\n"
    )
    command = [bench_run.sys.executable, "-c", script]
    real = bench_run.subprocess.Popen
    monkeypatch.setattr(bench_run.subprocess, "Popen", lambda _, **options: real(command, **options))
    names = ("fine", "dies", "fine_too", "hangs", "last")
    job = bench_run.BenchJob(tuple(("op", name, "float32", "x.y") for name in names), "cpu", 0.1)
    result = bench_run.run_isolated(job, 2.0, lambda _: None)
    assert [key[1] for key in result.left_out] == ["fine", "fine_too", "last"]
    found = [(t.verdict.case, t.verdict.status, t.verdict.problems) for t in result.timings]
    assert found == [
        ("op-dies-float32", "Crash", ("ended with code 1: out of luck",)),
        ("op-hangs-float32", "Timeout", ("said nothing for 2 s",)),
    ]


def test_an_earlier_report_outlives_a_run_that_timed_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    kept = tmp_path / "ops.json"
    kept.write_text("earlier", "utf-8")
    monkeypatch.setattr(bench_run, "run_job", stop)
    words = ["op", "bench", "rms_norm", "--sample", "plain", "--device", "cpu", "--save", str(kept)]
    assert main(words) == 130 and kept.read_text("utf-8") == "earlier"


def test_what_was_timed_is_kept_when_it_is_ended(tmp_path: Path) -> None:
    """A real process, told to end after its first line."""
    kept, pipe = tmp_path / "ops.json", subprocess.PIPE
    words = ("silu_and_mul,situ_and_mul", "--device", "cpu", "--seconds", "1", "--save", str(kept))
    command = [sys.executable, "-P", "-m", "k3hal.cli", "op", "bench", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
        assert run.stdout and run.stderr
        line = next(line for line in run.stdout if " us " in line)
        run.terminate()
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 143 and errors == "interrupted: what was timed is kept\n"
    report = json.loads(kept.read_text("utf-8"))
    assert line.split()[0] in {row["provider"] for row in report["results"] if row["seconds"]} and report["left_out"]
