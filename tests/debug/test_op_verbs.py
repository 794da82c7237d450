"""`op run`, `op compare` and `op replay`: exit codes, JSON, files, and child processes that die."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3hal.cli import main
from k3hal.debug.batching import units
from k3hal.debug.case import Case
from k3hal.debug.case_file import load_case, save_case
from k3hal.debug.forks import Outcome
from k3hal.debug.isolate import check_isolated
from k3hal.dispatch import registry as registries
from k3hal.dispatch.registry import Registry, default_registry

from . import faulty_backend

Run = Callable[..., tuple[int, str, str]]
MakeCase = Callable[..., Case]
BACKEND = "faulty_backend"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The faulty backend in this process's registry, and importable by child processes."""
    there = default_registry()
    mine = Registry(dict(there.backends), list(there.providers))
    mine.add_module(faulty_backend)
    monkeypatch.setattr(registries, "_default", [mine])
    monkeypatch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parent), *filter(None, sys.path)]))
    return faulty_backend


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("compare", "rms_norm")` -> exit code, stdout, stderr; in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["op", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def _json(run: Run, *args: str, code: int = 0) -> Any:
    got, out, err = run(*args, "--json")
    assert got == code, err
    return json.loads(out)


def test_compare_passes_and_says_so(run: Run) -> None:
    data = _json(run, "compare", "silu_and_mul", "--device", "cpu", "--tag", "tiny", "--provider", "cpu,reference")
    assert data["schema"] == "k3hal.op_compare/1"
    assert {row["status"] for row in data["results"]} == {"Pass"}
    assert {row["provider"] for row in data["results"]} >= {"reference"}
    code, out, _ = run("compare", "silu_and_mul", "--device", "cpu", "--tag", "tiny")
    assert code == 0
    assert out.startswith("Pass ")


def test_a_mismatch_is_shrunk_saved_and_replayed(run: Run, faulty: ModuleType, tmp_path: Path) -> None:
    data = _json(run, "compare", "silu_and_mul", "--provider", "faulty.late_row", "--save", "out", code=1)
    (path,) = map(Path, data["saved"].values())
    assert units(load_case(path)) == 3
    code, out, _ = run("replay", str(path), "--provider", "faulty.late_row")
    assert code == 1
    assert "above its cap" in out
    assert run("replay", str(path), "--provider", "reference")[0] == 0
    assert _json(run, "replay", str(path), "--provider", "cpu")["results"][0]["recorded"] is None


def test_providers_are_compared_with_each_other(run: Run, faulty: ModuleType) -> None:
    args = ("compare", "silu_and_mul", "--tag", "tiny")
    assert run(*args, "--provider", "faulty.swapped", "--against", "faulty.swapped")[0] == 0
    assert run(*args, "--provider", "cpu", "--against", "faulty.swapped")[0] == 1


def test_an_invariant_by_name_and_all(run: Run) -> None:
    data = _json(run, "compare", "mla_decode", "--sample", "three", "--invariant", "all", "--provider", "reference")
    assert [row["invariant"] for row in data["results"]] == ["batch", "pad", "decode", "far"]
    assert run("compare", "mla_decode", "--sample", "three", "--invariant", "split")[0] == 4


def test_no_is_not_supported(run: Run, faulty: ModuleType) -> None:
    code, out, _ = run("compare", "silu_and_mul", "--provider", "faulty.never", "--tag", "tiny")
    assert code == 2
    assert "needs a chip that nobody has" in out


def test_an_exit_is_a_failure(run: Run, faulty: ModuleType) -> None:
    code, out, _ = run("compare", "silu_and_mul", "--provider", "faulty.leaves", "--tag", "tiny")
    assert code == 1 and "raised SystemExit: 0" in out


def test_json_is_one_document_whatever_a_provider_prints(
    faulty: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ["compare", "silu_and_mul", "--provider", "faulty.talks", "--tag", "tiny", "--save", str(tmp_path)]
    assert main(["op", *args, "--json"]) == 0
    out, err = capfd.readouterr()
    assert {row["status"] for row in json.loads(out)["results"]} == {"Pass"}
    assert "hello from Python" in err and "hello from a library" in err


def test_json_is_one_document_when_a_backend_prints_as_the_process_ends(tmp_path: Path) -> None:
    late = "import atexit, os; atexit.register(os.write, 1, b'bye'); atexit.register(print, 'bye')"
    start = f"{late}; import sys; from k3hal.cli import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", start, "op", "compare", "silu_and_mul", "--tag", "tiny", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] and done.stderr.count("bye") == 2


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("crash", "Crash", "killed by SIGSEGV"),
        ("hang", "Timeout", "did not end within"),
        ("swapped", "Fail", "above its cap"),
    ],
)
def test_a_child_that_dies_is_a_result(
    case_of: MakeCase, faulty: ModuleType, name: str, status: str, reason: str
) -> None:
    case = case_of("silu_and_mul", next(s.name for s in registries.get_operator("silu_and_mul").samples()))
    seconds = 8.0 if name == "hang" else 120.0
    verdict = check_isolated(case, f"faulty.{name}", timeout=seconds, plugins=(BACKEND,))
    assert verdict.status == status, verdict
    assert any(reason in text for text in verdict.reasons)


def test_run_shows_outputs(run: Run, faulty: ModuleType) -> None:
    data = _json(run, "run", "silu_and_mul", "--tag", "tiny", "--provider", "faulty.swapped")
    assert data["schema"] == "k3hal.op_run/1"
    assert data["results"][0]["outputs"]["out"]["nonfinite"] == 0
    assert "out " in run("run", "silu_and_mul", "--tag", "tiny")[1]


def test_run_says_how_often_and_where_runs_differ(
    run: Run, faulty: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty, "_CALLS", itertools.count())
    args = ("run", "silu_and_mul", "--sample", "strided", "--provider", "faulty.third_call")
    code, out, _ = run(*args, "--repeat", "7")
    assert code == 1 and "out differs between runs: 2 of 7 are not as the first; run 3: at [1, 2] it is " in out
    monkeypatch.setattr(faulty, "_CALLS", itertools.count())
    assert run(*args, "--repeat", "2")[0] == 0


def test_run_takes_tactics_and_isolates_them(run: Run, faulty: ModuleType) -> None:
    args = ("run", "kda_chunk", "--sample", "three_tokens", "--dtype", "float32", "--tactic", "all", "--no-poison")
    rows = _json(run, *args, "--isolate", "--cold", "0.01", "--repeat", "3")["results"]
    assert [row["provider"] for row in rows] == [
        "cpu.chunked",
        "cpu.chunked:chunk16",
        "cpu.chunked:chunk32",
        "cpu.chunked:chunk128",
    ]
    assert not any(row["problems"] for row in rows)
    plain = _json(run, *args)["results"]
    assert [row["outputs"] for row in plain] == [row["outputs"] for row in rows]


def test_an_isolated_run_that_hangs_is_a_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome("Timeout", None, "did not end within 1 s")
    monkeypatch.setattr("k3hal.debug.forks.Forks.__enter__", lambda forks: forks)
    monkeypatch.setattr("k3hal.debug.forks.Forks.__exit__", lambda *_: None)
    monkeypatch.setattr("k3hal.debug.forks.Forks.run", lambda *_, **__: outcome)
    code, out, _ = run("run", "silu_and_mul", "--tag", "tiny", "--isolate")
    assert code == 3
    assert "Timeout: did not end within 1 s" in out


def test_the_grid_varies_how_a_case_is_run(run: Run, faulty: ModuleType) -> None:
    args = ("compare", "kda_chunk", "--device", "cpu", "--sample", "three_tokens", "--dtype", "float32")
    rows = _json(run, *args, "--grid", "tactic=default,chunk16;start=warm,cold;mode=eager")["results"]
    assert [(row["provider"], row["start"], row["status"]) for row in rows] == [
        ("cpu.chunked", "warm", "Pass"),
        ("cpu.chunked", "cold", "Pass"),
        ("cpu.chunked:chunk16", "warm", "Pass"),
        ("cpu.chunked:chunk16", "cold", "Pass"),
    ]
    (row,) = _json(run, *args, "--grid", "mode=graph", code=2)["results"]
    assert (row["status"], row["problems"]) == ("NotSupported", ["cpu has no graphs"])
    rows = _json(run, *args, "--grid", "tactic=all", "--invariant", "split")["results"]
    assert [row["provider"].partition(":")[2] for row in rows] == ["", "chunk16", "chunk32", "chunk128"]


def test_replay_judges_what_was_recorded(run: Run, case_of: MakeCase, tmp_path: Path) -> None:
    case = case_of("embed", "repeats", "float32")
    wrong = case.args["weight"][case.args["ids"]] + 1
    recorded = Case(**{**{f: getattr(case, f) for f in case.__slots__}, "recorded": {"out": wrong}})
    path = save_case(recorded, tmp_path / "x.k3case")
    (row,) = _json(run, "replay", str(path))["results"]
    assert (row["status"], row["recorded"]["status"]) == ("Pass", "Fail")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("compare", "rms_nrom"), "unknown operator 'rms_nrom'"),
        (("compare", "rms_norm", "--provider", "cpuu"), "no provider is called 'cpuu'"),
        (("compare", "rms_norm", "--sample", "none"), "no sample of rms_norm matches"),
        (("compare", "rms_norm", "--grid", "rows=3"), "--grid: 'rows=3' is not AXIS=VALUES"),
        (("compare", "rms_norm", "--seeds", "0"), "--seeds is 0"),
        (("compare", "rms_norm", "--isolate", "--invariant", "batch"), "--isolate does not run invariants"),
        (("compare", "rms_norm", "--device", "h100"), "describes a machine that is not here"),
        (("run", "rms_norm", "--repeat", "0"), "--repeat is 0"),
        (("run", "rms_norm", "--cold", "-1"), "--cold is -1"),
        (("run", "rms_norm", "--tactic", "wide"), "has no tactic 'wide'"),
        (("run", "rms_norm", "--provider", "cpu:wide"), "has no tactic 'wide'"),
        (("compare", "rms_norm", "--grid", "heads=3"), "rms_norm has no heads axis"),
        (("compare", "kda_chunk", "--grid", "tactic=chunk17"), "cpu.chunked of kda_chunk has no tactic 'chunk17'"),
        (("compare", "rms_norm", "--isolate", "--grid", "start=cold"), "--isolate does not go with the start axis"),
        (("compare", "rms_norm", "--grid", "start=cold;mode=graph"), "mode=graph does not go with start=cold"),
        (("replay", "no.k3case"), "no.k3case: the case cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_4(run: Run, args: tuple[str, ...], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (4, "")
    assert message in err
    assert len(err.splitlines()) == 1
