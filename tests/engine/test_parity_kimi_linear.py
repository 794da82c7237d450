"""Kimi-Linear in fp32 against transformers, an independent implementation, on the same random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal import LLM, SamplingParams
from k3hal.model.write import write_preset

from ..oracle.hf import hf_generate, hf_logits, load_hf
from ..oracle.prompts import prompt_without_near_ties

LENGTH = 300


@dataclass(frozen=True)
class Foreign:
    """The checkpoint, a prompt of 300 tokens, transformers' model and its logits for the prompt."""

    path: Path
    prompt: list[int]
    model: Any
    logits: torch.Tensor


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    path = tmp_path_factory.mktemp("parity") / "kl-tiny"
    write_preset("kl-tiny", path, seed=0)
    prompt = prompt_without_near_ties(path, LENGTH).token_ids
    model = load_hf(path, torch.float32)
    return Foreign(path, prompt, model, hf_logits(model, prompt))


@pytest.mark.parametrize("chunk", [512, 97, 1], ids=["at_once", "in_chunks", "token_by_token"])
def test_logits_agree(foreign: Foreign, chunk: int) -> None:
    with LLM(foreign.path, device="cpu", dtype="float32", max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
        ours = llm.logits(foreign.prompt)
    assert ours.dtype == torch.float32
    assert foreign.logits.std() > 0.1
    torch.testing.assert_close(ours, foreign.logits, rtol=0, atol=1e-4)


def test_greedy_continuation_agrees(foreign: Foreign) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(foreign.path, device="cpu", dtype="float32") as llm:
        ours = llm.generate([foreign.prompt[:120]], params)[0].outputs[0].token_ids
    assert list(ours) == hf_generate(foreign.model, [foreign.prompt[:120]], 16)[0]
