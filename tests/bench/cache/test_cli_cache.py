"""`bench cache` as it is called: pinned keys, tables, pictures, and one-line refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.bench.cache import report, sources
from k3hal.bench.cache.trace import Trace
from k3hal.cli import main

KEYS = {
    "schema", "hit_rate", "oracle_hit_rate", "decoded_reuse_rate", "saved_flops", "recomputed_tokens", "copies_bytes",
    "extra_splits", "labels", "admission_us", "admission_cpu_us", "step_us",
}  # fmt: skip

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small_agents: Trace) -> Call:
    """`cache(...)`: exit code, stdout and stderr; `agentic:` seeds are the small trace."""
    monkeypatch.setitem(sources._GENERATORS, "agentic", lambda seed: small_agents)

    def run(*args: str | Path) -> tuple[int, str, str]:
        code = main(["bench", "cache", *map(str, args)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_pinned_keys(cache: Call) -> None:
    code, out, _ = cache("--trace", "agentic:0", "--budget-gb", "2", "--policy", "second-hit", "--oracle", "--json")
    document: dict[str, Any] = json.loads(out)
    assert code == 0 and document.keys() >= KEYS and document["schema"] == "k3hal.bench_cache/1"
    assert list(document["labels"]) == ["cold", "evicted_kv", "no_state", "alignment", "cap", "draft"]
    assert document["cached_tokens"] + sum(document["labels"].values()) == document["prompt_tokens"]
    assert document["admission_us"].keys() == document["step_us"].keys() == {"p50", "p99"}
    assert 0 < document["hit_rate"] <= document["bound_hit_rate"] <= document["ceiling_hit_rate"]
    assert 0 < document["decoded_reuse_rate"] <= 1


def test_an_external_tier_is_told_of(cache: Call) -> None:
    args = ("--trace", "agentic:0", "--budget-gb", "1.2", "--host-gb", "4", "--disk-gb", "8")
    code, out, _ = cache(*args, "--json")
    document: dict[str, Any] = json.loads(out)
    tier = document["tier"]
    assert code == 0 and (document["settings"]["host"], document["settings"]["disk"]) == (4 * 10**9, 8 * 10**9)
    assert 0 < tier["hit_rate_from_tier"] <= document["hit_rate"]
    assert tier["hit_rate_without"] < document["hit_rate"]
    code, out, _ = cache(*args)
    assert code == 0 and "1.2 GB + 4 GB host + 8 GB disk" in out and "came from the tier" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--host-gb", "0"), "--host-gb is 0.0"),
        (("--disk-gb", "nan"), "--disk-gb is nan"),
        (("--host-gb", "99999999"), "at most 10000"),
        (("--host-gb", "4", "--policy", "none"), "keeps nothing with --policy none"),
    ],
)
def test_a_wrong_tier_is_refused(cache: Call, args: tuple[str, ...], message: str) -> None:
    code, _, err = cache("--trace", "agentic:0", *args)
    assert code == 4 and message in err and len(err.splitlines()) == 1


def test_concurrent_and_saved(cache: Call, tmp_path: Path) -> None:
    args = ("--trace", "agentic:0", "--budget-gb", "3", "--mode", "concurrent:8", "--tp", "1", "--kv", "bf16")
    code, out, _ = cache(*args, "--head", "20", "--save", tmp_path / "r.json", "--save", tmp_path / "r.md")
    assert code == 0 and "hit rate" in out and "20 requests" in out
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["mode"] == "concurrent:8"
    assert "| hit rate |" in (tmp_path / "r.md").read_text()


def test_capacity_wastes_at_most_one_percent(cache: Call) -> None:
    code, out, _ = cache("--capacity", "--budget-gb", "100", "--json")
    capacity = json.loads(out)["capacity"]
    assert code == 0 and capacity["max_padding_waste"] <= 0.01
    assert {(row["tp"], row["kv"]) for row in capacity["padding"]} >= {
        (tp, kv) for tp in (1, 8, 16) for kv in ("fp8", "bf16")
    }
    for row in capacity["rows"]:
        assert row["waste"] <= 0.01 and row["fits"] == (
            row["reserved"] <= row["most"] / row["concurrency"] * row["reserved"]
        )
    table = cache("--capacity")[1]
    assert "TP16 bf16" in table and "1,048,576" in table


def test_a_picture_of_every_policy(cache: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "SWEEP", (0.01, 1.0, 2.0))
    code, out, said = cache(
        "--trace", "agentic:0", "--budget-gb", "1", "--head", "16", "--plot", tmp_path / "p", "--json"
    )
    sweep = json.loads(out)["sweep"]
    assert code == 0 and "wrote" in said
    assert sweep["budgets"] == [10**9, 2 * 10**9], "a budget that cannot hold the longest request is left out"
    assert sweep["policies"].keys() == set(report.POLICIES)
    assert all(len(rates) == 2 for rates in [*sweep["policies"].values(), sweep["oracle"], sweep["bound"]])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and "proven bound" in (
        tmp_path / "p.svg"
    ).read_text()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 4, "nothing to do"),
        (["--plot", "x"], 4, "--plot needs --trace"),
        (["--micro", "--plot", "x"], 4, "--plot needs --trace"),
        (["--trace", "agentic"], 4, "seed"),
        (["--trace", "no-such-file"], 4, "cannot be read"),
        (["--trace", "agentic:0", "--policy", "best"], 4, "unknown prefix cache policy"),
        (["--trace", "agentic:0", "--mode", "parallel"], 4, "--mode"),
        (["--trace", "agentic:0", "--mode", "concurrent:0"], 4, "--mode"),
        (["--trace", "agentic:0", "--budget-gb", "0"], 4, "--budget-gb"),
        (["--trace", "agentic:0", "--budget-gb", "nan"], 4, "--budget-gb"),
        (["--trace", "agentic:0", "--budget-gb", "1e6"], 4, "at most 10000"),
        (["--trace", "agentic:0", "--budget-gb", "1e300"], 4, "at most 10000"),
        (["--trace", "agentic:0", "--plot", "no-such-folder/p"], 4, "is not a directory"),
        (["--trace", "agentic:0", "--tp", "5"], 4, "--tp is 5"),
        (["--trace", "agentic:0", "--kv", "int4"], 4, "int4"),
        (["--trace", "agentic:0", "--head", "0"], 4, "--head"),
        (["--trace", "agentic:0", "--peer", "sglang"], 4, "--peer"),
        (["--trace", "agentic:0", "--peer-python", "python3"], 4, "--peer"),
        (["--trace", "agentic:0", "--peer", "vllm", "--tp", "4"], 4, "--tp 8"),
        (["--trace", "agentic:0", "--save", "x.txt"], 4, "x.txt"),
        (["--trace", "agentic:0", "--budget-gb", "0.05"], 2, "holds"),
    ],
)
def test_refusals_are_one_line(cache: Call, args: list[str], code: int, said: str) -> None:
    got, _, error = cache(*args)
    last = error.strip().splitlines()[-1]
    assert got == code and said in error and "Traceback" not in error and last


def test_an_interpreter_without_vllm_is_named(cache: Call, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'raise ImportError(\"no vllm here\")'\n")
    fake.chmod(0o755)
    args = ("--trace", "agentic:0", "--head", "5", "--budget-gb", "2", "--peer", "vllm", "--peer-python")
    code, _, error = cache(*args, fake)
    assert code == 4 and "no vllm here" in error and "Traceback" not in error
    code, _, error = cache(*args, tmp_path / "absent")
    assert code == 4 and "No such file" in error
