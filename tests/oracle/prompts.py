"""Random prompts on which rounding in fp32 cannot change the router's choice."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .k3_naive import OracleResult, naive_logits
from .weights import read_config, read_tensors

FP32_NEAR_TIE = 4e-6
"""Router gap in fp64 below which fp32 arithmetic in another order may choose another expert: some ten times the
error that fp32 leaves in a score between 0 and 1 after sixteen layers."""

ATTEMPTS = 20
SPECIAL_TOKENS = 256
"""The last ids of a vocabulary; prompts hold none."""


@dataclass(frozen=True)
class Prompt:
    """Token ids and what the oracle makes of them."""

    token_ids: list[int]
    oracle: OracleResult


def prompt_without_near_ties(checkpoint: Path, length: int) -> Prompt:
    """The first of some seeded random prompts whose smallest router gap is at least `FP32_NEAR_TIE`.

    Raises ValueError when none is: then the checkpoint's router is too flat to be compared in fp32.
    """
    config, tensors = read_config(checkpoint), read_tensors(checkpoint)
    vocab = config.get("text_config", config)["vocab_size"] - SPECIAL_TOKENS
    for seed in range(ATTEMPTS):
        token_ids = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        oracle = naive_logits(config, tensors, token_ids)
        if oracle.router_gaps.min() >= FP32_NEAR_TIE:
            return Prompt(token_ids, oracle)
    raise ValueError(f"all of {ATTEMPTS} prompts of {length} tokens have a router near-tie in {checkpoint}")
