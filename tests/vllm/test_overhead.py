"""The adapter's cost in vLLM, by `ci/vllm_overhead.py`, in a thread's own time: machines have other things to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3hal.model.write import write_preset

from .vllm_run import DEADLINE, needs_vllm

SCRIPT = Path(__file__).parents[2] / "ci" / "vllm_overhead.py"

pytestmark = [needs_vllm, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seqs", [1, 64])
def test_a_step_costs_at_most_a_tenth_more_than_in_the_own_engine(tmp_path: Path, seqs: int) -> None:
    write_preset("tiny", tmp_path / "tiny")
    asked = [str(tmp_path / "tiny"), "--seqs", str(seqs), "--context", "100", "--repeats", "60", "--clock", "cpu"]
    ran = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *asked],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    assert found["ratio"] <= 1.10, found
    assert found["metadata_us"] <= 50, found
