"""Tiny on a real device: the greedy answers of a CPU, whatever shares a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.cli import main
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

pytestmark = pytest.mark.device
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
LENGTHS = (1, 2, 17, 64, 65, 130, 300, 700)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert main(["model", "init", str(folder), "--preset", "tiny", "--seed", "3"]) == 0
    return folder


def _answers(folder: Path, device: str, **options: Any) -> list[list[int]]:
    prompts = [[random.Random(n).randrange(256) for _ in range(n)] for n in LENGTHS]
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "memory_budget": 4.0}
    with LLM(folder, device=device, **(sizes | options)) as model:
        return [output.outputs[0].token_ids for output in model.generate(prompts, GREEDY)]


def test_greedy_answers_are_those_of_the_cpu(tiny_dir: Path) -> None:
    expected = _answers(tiny_dir, "cpu")
    assert len({tuple(ids) for ids in expected}) == len(LENGTHS)
    assert _answers(tiny_dir, "cuda") == expected
    # In chunks, and with sequences that wait for others.
    assert _answers(tiny_dir, "cuda", max_num_batched_tokens=128, max_num_seqs=3) == expected
