"""What planning costs: no torch, and no more than 300 ms."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from k3hal.plan.hardware import known_hardware
from k3hal.plan.nearest import plan_or_refuse
from k3hal.plan.recipe_toml import builtin_recipe
from k3hal.plan.request import PlanRequest

from .examples import EXAMPLES, PD

BUDGET = 0.3
_REPORT = """
import json, os, sys
from k3hal.cli import main
code = main(sys.argv[1:])
loaded = [name for name in ("torch", "numpy", "pydantic", "fastapi", "yaml", "rich.table") if name in sys.modules]
spent = os.times()
print("\\n" + json.dumps([code, loaded, spent.user + spent.system]))
"""


@pytest.mark.parametrize("args", [EXAMPLES["one node"].args, EXAMPLES["hopper over base"].args, PD])
def test_a_plan_for_named_hardware_is_quick_and_loads_nothing_heavy(args: str) -> None:
    """The time of the whole process, the interpreter's start included, as it is charged for the processor: other
    processes of a busy machine do not count, but for what they take from the caches. One of five must be within."""
    command = [sys.executable, "-P", "-c", _REPORT, "plan", *args.split(), "--json"]
    spent = []
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        code, loaded, seconds = json.loads(done.stdout.splitlines()[-1])
        assert (code, loaded) == (0, [])
        spent.append(seconds)
        if seconds < BUDGET:
            break
    assert spent[-1] < BUDGET, spent


def test_a_refusal_with_its_nearest_plan_is_as_quick() -> None:
    command = [sys.executable, "-P", "-c", _REPORT, "plan", "--hardware", "gb200", "--strategy", "multi_node_tep"]
    done = subprocess.run([*command, "--nodes", "2"], capture_output=True, text=True, check=True)
    code, loaded, _ = json.loads(done.stdout.splitlines()[-1])
    assert (code, loaded) == (2, [])


def test_planning_itself_takes_milliseconds() -> None:
    request = PlanRequest(recipe=builtin_recipe(), hardware=known_hardware()["gb200"], strategy="pd_cluster")
    plan_or_refuse(request)
    begun = time.process_time()
    for _ in range(10):
        plan_or_refuse(request)
    assert (time.process_time() - begun) / 10 < BUDGET / 3
