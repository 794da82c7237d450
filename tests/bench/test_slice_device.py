"""`bench slice` and generated weights on a real device."""

from __future__ import annotations

import json

import pytest
import torch

from k3hal.checkpoints import generated_model
from k3hal.cli import main
from k3hal.model.generated import GeneratedReader

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")


def test_weights_are_drawn_there_alike_each_time() -> None:
    source = generated_model("random:nano")
    assert source is not None
    readers = [GeneratedReader(source, "cuda", torch.bfloat16) for _ in range(2)]
    for name, spec in source.specs.items():
        first, again = (reader.get(name) for reader in readers)
        assert first.is_cuda and first.shape == spec.shape and torch.equal(first, again), name
        if name.endswith("weight_packed"):
            assert first.unique().numel() > 200
        elif name.endswith("weight_scale"):
            assert int(first.max()) - int(first.min()) <= 2
        else:
            assert first.isfinite().all() and first.float().std() > 0
    for reader in readers:
        reader.finish()


def test_a_report_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch", "1,4", "--context", "300", "--prefill", "600", "--engine-prompt", "32")
    code = main(["bench", "slice", "random:tiny", "--device", "cuda", *sizes, "--memory-budget", "4", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["device"].startswith("cuda")
    for row in report["decode"]:
        assert row["fits"] and row["step"]["launched"] > 0
        kinds = [kind for kind in row["layers"] if kind != "ends"]
        counts = report["model"]["layers"]
        layers = sum(counts[kind] * row["layers"][kind]["seconds"] for kind in kinds)
        # A step is its layers and its ends, give or take what graphs overlap.
        assert 0.5 < row["step"]["seconds"] / (layers + row["layers"]["ends"]["seconds"]) < 1.5
        assert all(part["seconds"] > 0 for kind in kinds for part in row["layers"][kind]["operators"])
    for row in report["engine"]:
        assert 0 <= row["idle"] < 1 and row["device"] > 0 and row["depth"] == 2
