"""What is imported when: the front loads no torch, so `k3hal --help` is quick and works without any vendor library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "transformers", "fastapi", "uvicorn", "safetensors", "tiktoken", "triton")


def _heavy_after(statement: str) -> set[str]:
    """The heavy packages loaded in a fresh interpreter once `statement` has run."""
    report = f"import sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    command = [sys.executable, "-P", "-c", f"{statement}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_k3hal_loads_nothing_heavy() -> None:
    assert _heavy_after("import k3hal, k3hal.errors, k3hal.sampling_params") == set()


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["no-such-verb"]])
def test_root_command_loads_nothing_heavy(args: list[str]) -> None:
    assert _heavy_after(f"from k3hal.cli import main; main({args!r})") == set()


def test_help_of_every_verb_loads_no_torch() -> None:
    statement = (
        "from k3hal.cli import main\n"
        "from k3hal.cli.app import VERBS\n"
        "assert [main([verb, '--help']) for verb in VERBS] == [0] * len(VERBS)"
    )
    assert "torch" not in _heavy_after(statement)


def test_a_mounted_package_refuses_a_second_name() -> None:
    # From the root of a checkout `import dispatch` would find the folder and make a second registry.
    command = [sys.executable, "-c", "import dispatch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "import this package as k3hal.dispatch" in done.stderr
