"""Ascend machines emulated, as `ci/emulated.py` judges them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3hal.conform.environment import is_emulated
from k3hal.conform.package import read_report

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("machine", "arch", "op", "own"),
    [
        ("ascend_910b", "ascend910b", "rms_norm", "ascend.torch_npu"),
        ("ascend_910c", "ascend910c", "moe_experts_mxfp4", "ascend.torch_npu_sums"),
        ("ascend_950", "ascend950", "moe_experts_mxfp4", "ascend.torch_npu"),
    ],
)
def test_an_adapter_of_an_emulated_machine_reaches_e2_and_no_more(
    tmp_path: Path, machine: str, arch: str, op: str, own: str
) -> None:
    out = tmp_path / "package"
    command = [sys.executable, "-P", "ci/emulated.py", machine, "--op", op, "--out", str(out), "--jobs", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(out)
    assert is_emulated(report) and report["device"]["vendor"] == "ascend" and report["device"]["arch"] == arch
    levels = {one["provider"]: one["level"] for one in report["providers"] if one["levels"]}
    assert levels == {own: "E2", "ascend.torch": "E2"}
