"""The Ascend backend's Triton kernels: right under the interpreter, and lowered by triton-ascend where that is."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.call import Call
from k3hal.dispatch.describe import describe

from .interpreter import found_wrong

ROOT = Path(__file__).parents[2]
PYTHON = "TRITON_ASCEND_PYTHON"
"""Names the Python of an environment that has triton-ascend, which no other Triton can be beside."""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_are_right_under_the_interpreter() -> None:
    assert not found_wrong([], "triton_ascend_special.py", ("kda_recurrent",))


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no environment with triton-ascend")
def test_kernels_are_lowered_by_triton_ascend() -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "ci" / "typing")}
    command = [os.environ[PYTHON], "-P", str(ROOT / "ci" / "ascend_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "FAIL" not in done.stdout and done.stdout.count("ok ") == 3, (
        done.stdout + done.stderr
    )


def test_without_vllm_ascend_decoding_takes_the_kernel() -> None:
    machine = describe("ascend_910c")
    packages = {name: version for name, version in machine.packages.items() if name != "vllm-ascend"}
    dims = {"heads": 12, "head_dim": 128, "conv_width": 4, "bounded": True}
    decision = build_selector().decide(
        Call("kda_decode", replace(machine, packages=packages), "bfloat16", "decode", dims)
    )
    assert decision.provider == "composed" and decision.graph_safe
    assert decision.parts["kda_recurrent"].provider == "ascend.triton_ascend"
    assert any("needs package vllm-ascend" in why for line in decision.trace for why in line.reasons)
