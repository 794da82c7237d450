"""Starts Triton's interpreter, which a process has from its start or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Check = tuple[str, str, str, str, str]
"""Operator, provider with or without tactic, sample, dtype, invariant or ""."""


def found_wrong(checks: Sequence[Check], special: str = "", names: Sequence[str] = ()) -> list[Any]:
    """Every check that is no Pass, with its reasons. `special` is a file beside this one and `names` its checks'."""
    here = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-P", str(here / "triton_interpreted.py"), *([str(here / special)] if special else [])]
    done = subprocess.run(
        command, input=json.dumps(checks), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return [(one, *got) for one, got in zip([*checks, *names], results, strict=True) if got[0] != "Pass"]
