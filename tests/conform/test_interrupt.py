"""Ctrl-C and SIGTERM end a run at once, also one that hangs, and what a killed run left is swept by the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3hal.conform.package import new_package

SCRIPT = """
import sys
from functools import partial
from k3hal.cli import main
from k3hal.conform import run
from k3hal.conform.selection import registry_with
plugins = ("hanging_backend",)
registry_with(plugins)
run.How = partial(run.How, plugins=plugins)
sys.exit(main(sys.argv[1:]))
"""


def _start(tmp_path: Path) -> subprocess.Popen[str]:
    """A run whose provider hangs by now."""
    marker = tmp_path / "hangs"
    paths = ":".join(filter(None, [str(Path(__file__).parent), *sys.path]))
    env = {**os.environ, "PYTHONPATH": paths, "HANGING_FILE": str(marker)}
    flags = ["--device", "cpu", "--backend", "hanging", "--op", "silu_and_mul", "--quick", "--timeout", "600"]
    command = [sys.executable, "-P", "-c", SCRIPT, "conform", "run", *flags, "--out", str(tmp_path / "at" / "out")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not marker.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def _left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "at").iterdir()]


def _write(out: Path) -> None:
    with new_package(out) as folder:
        (folder / "report.json").write_text('{"schema": "k3hal.conform/1"}', "utf-8")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_that_hangs(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    with _start(tmp_path) as process:
        process.send_signal(sent)
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (code, "interrupted\n")
    assert _left(tmp_path) == []


def test_the_folder_of_a_killed_run_is_swept_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "at" / "out"
    mine = tmp_path / "at" / ".out.settings"
    mine.mkdir(parents=True)
    with _start(tmp_path) as process:
        [running] = set(_left(tmp_path)) - {mine.name}
        _write(out)
        assert running in _left(tmp_path)
        process.kill()
        process.communicate()
    _write(out)
    assert sorted(_left(tmp_path)) == [mine.name, "out"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by Linux's /proc")
def test_a_hanging_worker_does_not_outlive_a_killed_run(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    with _start(tmp_path) as process:
        assert len(_of_the_run(tmp_path)) > 1
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while _of_the_run(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _of_the_run(tmp_path: Path) -> list[int]:
    """The processes that run with `_start`'s environment."""
    found, mine = [], f"HANGING_FILE={tmp_path / 'hangs'}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another's, or gone
            continue
        if mine in environment:
            found.append(int(folder.name))
    return found
