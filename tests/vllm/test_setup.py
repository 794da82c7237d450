"""ci/setup-vllm says what is wrong before it makes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "setup-vllm"


@pytest.mark.parametrize("version", ["(3, 10, 9)", "(3, 14, 0)"])
def test_a_python_that_has_no_vllm_is_refused(tmp_path: Path, version: str) -> None:
    """On the newer one pip would leave vLLM out, and say nothing."""
    python = tmp_path / "python"
    pretend = f'exec "{sys.executable}" -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"'
    python.write_text(f"#!/bin/sh\n{pretend}\n")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    ran = subprocess.run([SCRIPT, tmp_path / "venv"], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 4 and ran.stderr.count("\n") == 1
    assert "Python 3.11 to 3.13" in ran.stderr and not (tmp_path / "venv").exists()
