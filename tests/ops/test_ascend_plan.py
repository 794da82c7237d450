"""The full-size model's plan on Ascend machines: nothing is left to references, and every choice says why."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from k3hal.cli.app import app
from k3hal.cli.op_calls import requests_of
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.describe import describe
from k3hal.dispatch.plan import make_plan
from k3hal.engine.graphs import not_capturable

DEVICES = ("ascend_910b", "ascend_910c", "ascend_950")


@pytest.mark.parametrize("device", DEVICES)
def test_no_operator_of_a_step_runs_its_reference(device: str) -> None:
    done = CliRunner().invoke(app, ["op", "plan", "--device", device, "--json"])
    assert done.exit_code == 0, done.output
    entries = json.loads(done.stdout)["entries"]
    assert entries and not [e["op"] for e in entries if e["reference"]]
    assert all(e["reasons"] for e in entries)
    assert {e["backend"] for e in entries if not e["composed"]} == {"ascend"}


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_may_hold_all_that_decoding_runs(device: str) -> None:
    requests = requests_of(None, "bfloat16", "bfloat16", 1)
    plan = make_plan(requests, build_selector(None, "warn"), model="k3", device=describe(device), dtype="bfloat16")
    assert not not_capturable(plan)
