"""Adding a provider touches one file, and so does adding an operator: each is dropped into a copy of the packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OPERATOR = '''
"""Twice the input."""

from k3hal.dispatch.operator import Cost, Operator


def twice(x):
    """`2 x`, any shape."""
    return 2 * x


OPERATOR = Operator(twice, "toy", {"out": "exact"}, lambda: iter(()), lambda x: Cost(1.0, 8.0))
'''
PROVIDER = '''
"""Twice the input by a sum."""

from k3hal.dispatch import provides


@provides("twice", name="sum")
def twice(x):
    return x + x
'''
ASK = """
import json
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.call import Call
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

call = Call("twice", probe("cpu"), "float32")
chosen = [build_selector(ops).decide(call) for ops in ("twice=reference", None)]
print(json.dumps([get_operator("twice").summary, [[c.provider, c.function()(21)] for c in chosen]]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the mounted packages in the layout they are imported in."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "k3hal", tmp_path / "k3hal", ignore=ignore)
    for package in ("dispatch", "backends"):
        shutil.copytree(ROOT / package, tmp_path / "k3hal" / package, ignore=ignore)
    return tmp_path


def test_an_operator_and_its_provider_are_one_file_each(tree: Path) -> None:
    (tree / "k3hal" / "dispatch" / "ops" / "twice.py").write_text(OPERATOR)
    (tree / "k3hal" / "backends" / "cpu" / "twice_by_sum.py").write_text(PROVIDER)
    environment = os.environ | {"PYTHONPATH": str(tree)}
    environment.pop("K3HAL_OPS", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["`2 x`, any shape.", [["reference", 42], ["cpu.sum", 42]]]
