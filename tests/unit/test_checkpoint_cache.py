"""The default checkpoint in the user's cache, and what a MODEL argument may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3hal import checkpoints
from k3hal.errors import InputError, UsageError
from k3hal.model import write
from k3hal.model.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "k3hal" / "checkpoints"


def test_generated_once(cache: Path) -> None:
    first = checkpoints.default_checkpoint()
    assert first.name == "nano"
    assert first.parent.parent == cache
    stamp = (first / "config.json").stat().st_mtime_ns
    assert checkpoints.resolve_model(None) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert Checkpoint.open(first).config.hidden_size == 128


def test_a_new_generator_makes_a_new_one(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = checkpoints.default_checkpoint()
    monkeypatch.setattr(write, "GENERATOR_VERSION", write.GENERATOR_VERSION + 1)
    second = checkpoints.default_checkpoint()
    assert first != second
    assert {entry.name for entry in cache.iterdir()} == {first.parent.name, second.parent.name}


def test_processes_may_race(cache: Path) -> None:
    code = "from k3hal.checkpoints import default_checkpoint; print(default_checkpoint())"
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-P", "-c", code]
    racers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(results) == 1
    assert [str(entry) for entry in cache.glob("*/*")] == list(results)  # no half-written leftovers
    Checkpoint.open(results.pop())


def test_losing_the_race_uses_the_winner(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Another process finishes after this one found nothing and before it could put its own in place."""
    generate = write.write_checkpoint
    winner: list[int] = []

    def slow(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(write, "write_checkpoint", generate)
        winner.append(checkpoints.default_checkpoint().stat().st_ino)
        generate(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "write_checkpoint", slow)
    chosen = checkpoints.default_checkpoint()
    assert [chosen.stat().st_ino] == winner  # someone may be reading it already
    assert list(cache.glob("*/*")) == [chosen]
    Checkpoint.open(chosen)


def test_an_unusable_cache_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"the default model cannot be generated: .*set XDG_CACHE_HOME to a writable"):
        checkpoints.default_checkpoint()


def test_home_is_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoints.cache_dir() == tmp_path / ".cache" / "k3hal"


def test_model_arguments(tmp_path: Path) -> None:
    assert checkpoints.resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(UsageError, match=r"'tiny' is a preset.*k3hal model init --preset tiny DIR"):
        checkpoints.resolve_model("tiny")
    with pytest.raises(UsageError, match=r"'moonshotai/Kimi-K3' is not a directory .expected a checkpoint directory"):
        checkpoints.resolve_model("moonshotai/Kimi-K3")
    with pytest.raises(UsageError, match="a source like k3-slice:4@tp8"):
        checkpoints.resolve_model("k3-slice")


def test_a_relative_cache_folder_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert checkpoints.cache_dir() == tmp_path / ".cache" / "k3hal"
