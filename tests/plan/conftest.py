"""Running `k3hal plan` inside the test process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from k3hal.cli import main


class Answer(NamedTuple):
    """Exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Answer]:
    """`plan("--hardware b300 --json")`."""
    for name in ("K3HAL_OPS", "K3HAL_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def run(args: str) -> Answer:
        capsys.readouterr()
        code = main(["plan", *shlex.split(args)])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
