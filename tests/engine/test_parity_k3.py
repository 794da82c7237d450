"""K3 in fp32 and bf16 against the naive fp64 oracle, on generated checkpoints in the published layout."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from k3hal import LLM
from k3hal.model.write import write_preset

from ..oracle.k3_naive import naive_logits
from ..oracle.prompts import Prompt, prompt_without_near_ties
from ..oracle.weights import read_config, read_tensors
from .recorded_routing import OPS, recorded_routing

LENGTH = 200

BF16_NEAR_TIE = 0.01
"""Router gap, of scores in 0..1, below which bf16 activations may choose another expert. Rounding noise of half a per
cent moves a score by about 0.001; the widest gap seen to be decided otherwise is 0.003."""

BF16_MAX_FLIPPED = 0.05
"""Largest share of (MoE layer, token) pairs in which the choice may differ; about 0.02 is seen."""


@dataclass(frozen=True)
class Case:
    path: Path
    prompt: Prompt


@pytest.fixture(scope="module", params=["nano", "tiny"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("parity") / request.param
    write_preset(request.param, path, seed=0)
    return Case(path, prompt_without_near_ties(path, LENGTH))


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize(("chunk", "length"), [(512, LENGTH), (67, LENGTH), (1, 64)], ids=["once", "chunks", "tokens"])
def test_fp32_logits_agree(case: Case, chunk: int, length: int) -> None:
    expected = case.prompt.oracle.logits[:length]
    with LLM(case.path, device="cpu", dtype="float32", max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
        ours = llm.logits(case.prompt.token_ids[:length])
    assert expected.std() > 0.1
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-4)


def test_bf16_logits_agree_where_the_engine_chose_the_experts(case: Case) -> None:
    """The oracle takes the experts the engine took, so that a near-tie decided otherwise does not count as an error.

    Each such decision must be a near-tie, and they are counted.
    """
    config, tensors, token_ids = read_config(case.path), read_tensors(case.path), case.prompt.token_ids
    text = config["text_config"]
    moe_layers = range(text["first_k_dense_replace"], text["num_hidden_layers"])
    with recorded_routing() as calls:
        with LLM(case.path, device="cpu", dtype="bfloat16", ops=OPS, max_num_batched_tokens=512) as llm:
            calls.clear()
            ours = llm.logits(token_ids)
        routing = {layer: ids[:LENGTH] for layer, ids in zip(moe_layers, calls, strict=True)}
    oracle = naive_logits(config, tensors, token_ids, routing=routing)
    gaps = oracle.router_gaps[moe_layers.start :]
    assert gaps.min() > -BF16_NEAR_TIE
    assert (gaps < 0).double().mean() < BF16_MAX_FLIPPED
    _assert_bf16_close(ours, oracle.logits)


def test_bf16_error_stays_within_bounds_with_the_default_providers(case: Case) -> None:
    """Near-ties decided otherwise included."""
    with LLM(case.path, device="cpu", dtype="bfloat16") as llm:
        ours = llm.logits(case.prompt.token_ids)
    expected = case.prompt.oracle.logits
    assert _rms(ours - expected) <= 0.02 * _rms(expected)


def _assert_bf16_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """RMS error at most 2 % of the logits' RMS; same top-1 wherever the oracle's lead exceeds four times the error."""
    error = _rms(ours - expected)
    assert 0 < error <= 0.02 * _rms(expected)
    best = expected.topk(2).values
    lead = best[:, 0] - best[:, 1]
    assert (lead > 4 * error).double().mean() > 0.5
    wrong = ours.argmax(-1) != expected.argmax(-1)
    worst = lead[wrong].max().item() if wrong.any() else 0.0
    assert worst <= 4 * error, "a token that the oracle prefers clearly is not the engine's; are the logits rounded?"
