"""vLLM with the plugin gives the own engine's tokens, however prompts are batched, cut, cached or preempted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3hal.model.write import write_preset

from .vllm_run import Own, Round, needs_vllm, prompt, run_vllm

pytestmark = [needs_vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

MIXED = [prompt(length, seed) for seed, length in enumerate((5, 1, 130, 40, 300, 2, 64, 129))]
"""Below, at and beyond the block of 128 tokens, and a prompt of one token."""
LONG = prompt(700, 9)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {name: folder / name for name in ("tiny", "kl-tiny")}
    for name, path in found.items():
        write_preset(name, path, seed=0)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "kl-tiny"])
def test_one_process(checkpoints: dict[str, Path], tmp_path: Path, name: str, dtype: str) -> None:
    """A prompt alone, eight at once, one longer than a step takes, and prompts whose beginning is cached."""
    own = Own(checkpoints[name], dtype)
    rounds = [Round([prompt(33, 20)]), Round(MIXED), Round([LONG]), Round([LONG, LONG[:650] + prompt(50, 3)])]
    found = run_vllm(tmp_path, checkpoints[name], rounds, dtype=dtype, max_num_batched_tokens=256)
    assert found.platform == "K3HALPlatform" and "dispatch plan, " in found.log
    assert [min(cached) for cached in found.cached[:3]] == [0, 0, 0]
    assert min(found.cached[3]) >= 512  # in blocks of 128 tokens, or 256
    own.agrees(rounds, found)
    own.llm.close()


@pytest.mark.parametrize("name", ["tiny", "kl-tiny"])
def test_preemption(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """More sequences than the cache holds: some are thrown out, and begin again."""
    own = Own(checkpoints[name], "float32")
    rounds = [Round([prompt(120 + i, i) for i in range(8)], max_tokens=150)]
    found = run_vllm(tmp_path, checkpoints[name], rounds, dtype="float32", num_gpu_blocks_override=40)
    assert found.preempted > 0
    own.agrees(rounds, found)
    own.llm.close()


def test_processes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's usual way: the scheduler in one process, the model in another."""
    own = Own(checkpoints["tiny"], "float32")
    rounds = [Round(MIXED), Round([LONG]), Round([LONG]), Round([LONG])]
    found = run_vllm(tmp_path, checkpoints["tiny"], rounds, processes=True, dtype="float32", max_num_batched_tokens=256)
    assert found.cached[3] == [640]
    own.agrees(rounds, found)
    own.llm.close()


def test_prefixes_not_kept(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Without prefix caching a sequence has one block of state for its whole life."""
    own = Own(checkpoints["tiny"], "float32")
    rounds = [Round(MIXED), Round([LONG])]
    found = run_vllm(
        tmp_path, checkpoints["tiny"], rounds, dtype="float32", enable_prefix_caching=False, max_num_batched_tokens=200
    )
    own.agrees(rounds, found)
    own.llm.close()


@pytest.mark.parametrize("name", ["tiny", "kl-tiny"])
def test_two_ranks(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Tensor parallel over gloo: heads, experts' channels and, where it divides, the vocabulary in halves."""
    own = Own(checkpoints[name], "float32")
    rounds = [Round(MIXED), Round([LONG])]
    found = run_vllm(tmp_path, checkpoints[name], rounds, processes=True, dtype="float32", tensor_parallel_size=2)
    own.agrees(rounds, found)
    own.llm.close()


def test_latents_in_fp8(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    own = Own(checkpoints["tiny"], "bfloat16", kv_cache_dtype="fp8")
    rounds = [Round(MIXED)]
    found = run_vllm(tmp_path, checkpoints["tiny"], rounds, dtype="bfloat16", kv_cache_dtype="fp8")
    own.agrees(rounds, found)
    own.llm.close()


def test_other_sizes(tmp_path: Path) -> None:
    """Latents, heads and blocks of sizes that no kernel of vLLM's has, with random weights: what a prompt gets alone
    it also gets among others."""
    model = tmp_path / "odd"
    write_preset("nano", model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= {"kv_lora_rank": 96, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 64}
    config["text_config"]["linear_attn_config"] |= {"head_dim": 64, "short_conv_kernel_size": 3}
    (model / "config.json").write_text(json.dumps(config))
    alone = [Round([ids]) for ids in MIXED]
    found = run_vllm(
        tmp_path, model, [Round(MIXED), *alone], dtype="float32", load_format="dummy", block_size=96,
        enable_prefix_caching=False, max_num_batched_tokens=256,
    )  # fmt: skip
    assert found.tokens[0] == [tokens for (tokens,) in found.tokens[1:]]
    assert len({tuple(tokens) for tokens in found.tokens[0]}) > 1
