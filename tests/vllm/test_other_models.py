"""vLLM's own models are as they were, with the plugin installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .vllm_run import Round, needs_vllm, prompt, run_vllm

pytestmark = [needs_vllm, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_llama_answers_as_without_the_plugin(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [Round([prompt(40, 1), prompt(7, 2)])]
    with_plugin = run_vllm(tmp_path, llama, rounds, dtype="float32")
    monkeypatch.setenv("K3HAL_VLLM", "0")
    without = run_vllm(tmp_path, llama, rounds, dtype="float32")
    assert with_plugin.platform == "K3HALPlatform" and without.platform == "CpuPlatform"
    assert "k3hal stands aside: K3HAL_VLLM is 0" in without.log
    assert with_plugin.tokens == without.tokens and len(set(without.tokens[0][0])) > 3
