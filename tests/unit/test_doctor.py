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


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "k3hal.doctor/1"
    assert report["torch"]["version"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert 0 < report["machine"]["memory_available"] <= report["machine"]["memory_total"]
    assert report["machine"]["threads"] >= 1
    assert report["missing"] == []


def test_text_report_shows_each_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    labels = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"k3hal", "cpu", "memory", "python", "torch", "device", "cache", "packages"} == labels - {"system", "isa"}


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
    assert "import torch failed: libgomp.so.1" in capsys.readouterr().out


def test_a_missing_package_fails_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "_REQUIRED", ("torch", "no-such-distribution"))
    assert main(["doctor"]) == 1
    assert "missing   no-such-distribution" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: Xeon\nflags\t\t: avx2 amx_bf16\n\nmodel name\t: other\n", ("Xeon", {"avx2", "amx_bf16"})),
        ("processor\t: 0\nFeatures\t: asimd bf16\n", (None, {"asimd", "bf16"})),
        ("", (None, set())),
        ("no colon here", (None, set())),
    ],
)
def test_cpu_info(tmp_path: Path, text: str, expected: tuple[str | None, set[str]]) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text, encoding="utf-8")
    assert facts._cpu_info(path) == expected
    assert facts._cpu_info(tmp_path / "absent") == (None, set())


@pytest.mark.parametrize("value", ["", None])
def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x") if value is None else value)
    assert facts.cache_dir() == (tmp_path / ".cache" / "k3hal" if value == "" else tmp_path / "x" / "k3hal")
