"""What loading a model takes at its peak, beyond the weights that stay: read, fused and packed as providers want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3hal.model.write import write_preset

# The weights that stay are the bytes tensors cover: providers cut many tensors from one storage, and views overlap.
SCRIPT = """
import gc, sys, torch
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.plan import make_plan
from k3hal.dispatch.probe import probe
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.k3 import K3Model
from k3hal.model.reader import WeightReader
from k3hal.model.requests import model_requests

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def covered():
    tensors = [held for held in gc.get_objects() if type(held) is torch.Tensor and held.nbytes < 32 << 20]
    total, end = 0, 0
    for begin, size in sorted((held.data_ptr(), held.nbytes) for held in tensors):
        total += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    return total

checkpoint = Checkpoint.open(sys.argv[1])
name, dtype = sys.argv[2], getattr(torch, sys.argv[2])
device = probe("cpu")
requests = model_requests(checkpoint.config, name, name)
ops = make_plan(requests, build_selector(), model="tiny", device=device, dtype=name).bind()
torch.zeros(8, 8) @ torch.zeros(8, 8)
held, before = covered(), status("VmRSS")
with WeightReader(checkpoint, "cpu", dtype) as reader:
    model = K3Model.load(checkpoint.config, ops, reader, dtype=dtype)
    reader.finish()
peak = status("VmHWM")
print(peak - before, covered() - held)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "tiny"
    write_preset("tiny", folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory figures from Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_at_most_1_2_times_the_weights(tiny: Path, dtype: str) -> None:
    command = [sys.executable, "-P", "-c", SCRIPT, str(tiny), dtype]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    growth, weights = map(int, output.split())
    assert weights > 120 << 20 >> (0 if dtype == "float32" else 1)
    assert weights < growth <= 1.2 * weights, f"{growth} bytes at the peak for {weights} bytes of weights"
