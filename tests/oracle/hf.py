"""Hugging Face transformers' KimiLinear as the second, foreign oracle and as the speed baseline. Needs no fla."""

from pathlib import Path
from typing import Any

import torch


def load_hf(directory: Path, dtype: torch.dtype) -> Any:
    """A KimiLinearForCausalLM from a flat Kimi-Linear checkpoint, in evaluation mode on CPU.

    Raises ValueError if a tensor is missing, unexpected or misshapen: transformers alone would only warn and go on
    with random values.
    """
    from transformers import KimiLinearForCausalLM

    loaded: Any = KimiLinearForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    model, info = loaded
    faults = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if faults:
        raise ValueError(f"transformers does not load {directory} cleanly: {faults}")
    return model.eval()


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """fp32 `[T, vocab]`, one uncached forward pass over one sequence."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def hf_generate(model: Any, prompts: list[list[int]], n: int) -> list[list[int]]:
    """Greedy continuation of exactly `n` tokens for each prompt, as one static left-padded batch with its cache.

    Stop ids are off, so that the work done is known: len(prompts) * n tokens. One prompt gives the batch-1 baseline.
    """
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    greedy = GenerationConfig(do_sample=False, max_new_tokens=n, use_cache=True, pad_token_id=0, eos_token_id=None)
    model.generation_config = greedy
    return model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)[:, width:].tolist()
