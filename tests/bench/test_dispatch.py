"""What `bench dispatch` reports; how fast anything is, no test asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3hal.bench import dispatch

Bench = Callable[..., tuple[int, str, str]]


def test_the_report(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LIMIT_NS", 1e12)
    target = tmp_path / "report.json"
    code, out, _ = bench("dispatch", "--json", "--save", target)
    report = json.loads(out)
    assert code == 0 and report["schema"] == "k3hal.bench_dispatch/1" and report["within_limit"] is True
    assert json.loads(target.read_text()) == report
    assert set(report["calls"]) == {"empty", "rms_norm"}
    for call in report["calls"].values():
        assert call["same_function"] is True
        assert call["bound_ns"]["min"] > 0 and call["direct_ns"]["min"] > 0
    assert report["plans"]["kimi-k3"]["layers"] == 93 and report["plans"]["nano"]["layers"] == 8
    assert all(plan["decide"]["min"] > 0 for plan in report["plans"].values())
    assert sum(report["bound"].values()) == report["plans"]["nano"]["entries"]
    assert report["bound"]["provider"] > 0


def test_a_call_over_the_limit_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LIMIT_NS", -1e12)
    code, out, _ = bench("dispatch")
    assert code == 1
    assert "A bound call against a direct one" in out and "Making a dispatch plan" in out


def test_something_around_the_function_is_noticed() -> None:
    def wrapper(*args: object) -> None:
        dispatch._empty(*args)

    call = dispatch._compare_calls(wrapper, dispatch._empty, (None, None, 1e-5, None), 10, 1)
    assert call["same_function"] is False


def test_bad_repeat_is_one_line(bench: Bench) -> None:
    code, out, err = bench("dispatch", "--repeat", "0")
    assert code == 4 and out == "" and "--repeat is 0" in err
