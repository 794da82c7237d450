"""The oracle's Kimi-Linear form against transformers' own implementation, on random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from .hf import hf_generate, hf_logits, load_hf
from .k3_naive import naive_logits
from .synthetic import kimi_linear_config, random_tensors, write_checkpoint
from .weights import read_config, read_tensors

IDS = torch.randint(0, 90, (150,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents 50 times smaller than usual, so that the epsilon of their norm is visible."""
    directory = tmp_path_factory.mktemp("kimi-linear")
    tensors = random_tensors(kimi_linear_config(), seed=0)
    for name in tensors:
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name] = tensors[name] / 50
    write_checkpoint(directory, kimi_linear_config(), tensors, shards=3)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return load_hf(checkpoint, torch.float32)


def test_logits_agree(checkpoint: Path, model: Any) -> None:
    ours = naive_logits(read_config(checkpoint), read_tensors(checkpoint), IDS).logits
    assert ours.std() > 0.5
    torch.testing.assert_close(hf_logits(model, IDS).double(), ours, rtol=0, atol=2e-5)


def test_latent_norms_use_their_own_epsilon(checkpoint: Path, model: Any) -> None:
    other = naive_logits(read_config(checkpoint), read_tensors(checkpoint), IDS, latent_norm_eps=1e-5).logits
    assert (hf_logits(model, IDS) - other).abs().max() > 1e-3


def test_generation_is_the_argmax_of_the_oracle_alone_and_in_a_padded_batch(checkpoint: Path, model: Any) -> None:
    prompts = [IDS[:20], IDS[20:53]]
    batch = hf_generate(model, prompts, 8)
    config, tensors = read_config(checkpoint), read_tensors(checkpoint)
    for prompt, new in zip(prompts, batch, strict=True):
        assert len(new) == 8
        logits = naive_logits(config, tensors, prompt + new[:-1]).logits
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == new
        assert hf_generate(model, [prompt], 8) == [new]


def test_an_incomplete_checkpoint_is_refused_not_filled_with_random_values(tmp_path: Path) -> None:
    tensors = random_tensors(kimi_linear_config(), seed=0)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_checkpoint(tmp_path, kimi_linear_config(), tensors)
    with pytest.raises(ValueError, match=r"missing_keys.*layers\.1\.mlp\.up_proj"):
        load_hf(tmp_path, torch.float32)
