"""Adding a provider touches one file, and so does adding an operator: each is dropped into a copy of the packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
from k3hal.dispatch.registry import get_operator, operator_names

decision = build_selector(fallback="warn").decide(Call("twice", probe("cpu"), "float32"))
print(json.dumps([decision.provider, decision.function()(21), "twice" in operator_names(), get_operator("twice").summary]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the mounted packages in the layout they are imported in."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "k3hal", tmp_path / "k3hal", ignore=ignore)
    for package in ("dispatch", "backends"):
        shutil.copytree(ROOT / package, tmp_path / "k3hal" / package, ignore=ignore)
    return tmp_path


def _ask(tree: Path) -> Any:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    environment.pop("K3HAL_OPS", None)
    done = subprocess.run([sys.executable, "-P", "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_an_operator_and_then_a_provider_are_one_file_each(tree: Path) -> None:
    before = {path for path in tree.rglob("*") if path.is_file()}
    (tree / "k3hal" / "dispatch" / "ops" / "twice.py").write_text(OPERATOR)
    assert _ask(tree) == ["reference", 42, True, "`2 x`, any shape."]
    (tree / "k3hal" / "backends" / "cpu" / "twice_by_sum.py").write_text(PROVIDER)
    assert _ask(tree) == ["cpu.sum", 42, True, "`2 x`, any shape."]
    added = {p.name for p in tree.rglob("*") if p.is_file() and p not in before and p.suffix != ".pyc"}
    assert added == {"twice.py", "twice_by_sum.py"}
