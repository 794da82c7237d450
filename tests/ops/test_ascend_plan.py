"""The full-size model's plan on Ascend machines: nothing is left to references, and every choice says why."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from k3hal.cli.app import app

DEVICES = ("ascend_910b", "ascend_910c", "ascend_950")


@pytest.mark.parametrize("device", DEVICES)
def test_no_operator_of_a_step_runs_its_reference(device: str) -> None:
    done = CliRunner().invoke(app, ["op", "plan", "--device", device, "--json"])
    assert done.exit_code == 0, done.output
    entries = json.loads(done.stdout)["entries"]
    assert entries and not [e["op"] for e in entries if e["reference"]]
    assert all(e["reasons"] for e in entries)
    assert {e["backend"] for e in entries if not e["composed"]} == {"ascend"}
