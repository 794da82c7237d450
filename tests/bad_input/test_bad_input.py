"""Whatever is wrong with what a command is given, it says so in one line, with its exit code and nothing else."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from k3hal.cli import main

from .cases import CASES, GENERATE, Case


@pytest.fixture
def workplace(nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a good checkpoint called `model`."""
    shutil.copytree(nano_dir, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("K3HAL_OPS", "K3HAL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_command_that_is_spoilt_below_works(workplace: Path) -> None:
    assert main(shlex.split(GENERATE)) == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_one_line(
    case: Case, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.setup:
        case.setup(workplace)
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    code = main(shlex.split(case.args))
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (case.code, "", 1), err
    prefix, message = err[:14], err[14:]
    assert prefix == "k3hal: error: "
    assert re.search(case.message, message), message
    assert "bug" not in message and "Traceback" not in message
