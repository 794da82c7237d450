"""Load sources without files: which tensors they promise, which values they draw, and that an engine runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from k3hal.checkpoints import generated_model, open_model, resolve_model
from k3hal.engine.build import build
from k3hal.engine.interface import EngineRequest
from k3hal.engine.options import EngineOptions
from k3hal.engine.room import weight_bytes
from k3hal.errors import CapacityError, K3HALError, UsageError
from k3hal.llm import LLM
from k3hal.model.config import ModelConfig
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.manifest import expected_tensors
from k3hal.model.parallel import Shard
from k3hal.model.presets import preset_config
from k3hal.model.slice import slice_of
from k3hal.sampling_params import SamplingParams

COLUMN = re.compile(
    r"\.(q|k|v|g|b|f_b|q_b|kv_b|gate|up)_proj\.weight$|conv1d\.weight$|dt_bias$|\.w[13]\.weight|embed_tokens|lm_head"
)
ROW = re.compile(r"\.(o|down)_proj\.weight$|\.w2\.weight")
"""How ranks divide a model (spec k3_architecture §7.10); everything else is replicated, and A_log is padded."""


def _tiny() -> ModelConfig:
    """Preset `tiny` with a vocabulary that two ranks divide, and whose half still holds the synthetic one."""
    return replace(ModelConfig.from_json(preset_config("tiny")), vocab_size=1280)


def _tiny_slice(seed: int = 0) -> GeneratedModel:
    return GeneratedModel.of("tiny-slice:4@tp2", slice_of(_tiny(), 4, 2), seed=seed)


def _weights(model: GeneratedModel) -> Mapping[str, torch.Tensor]:
    reader = GeneratedReader(model, "cpu", torch.bfloat16)
    return {name: reader.get(name) for name in model.specs}


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("kimi-k3", 8), ("kimi-k3", 16)])
def test_a_rank_holds_the_part_that_a_loader_would_cut(name: str, ranks: int) -> None:
    source = generated_model("k3-slice:5")
    assert source is not None
    whole, count = (source.config, 5) if name == "kimi-k3" else (_tiny(), 16)
    part = slice_of(whole, count, ranks, first=0)
    shapes = {spec.name: spec.shape for spec in expected_tensors(part)}
    assert set(shapes) == {spec.name for spec in expected_tensors(whole)}
    for spec in expected_tensors(whole):
        shape = list(spec.shape)
        if COLUMN.search(spec.name):
            shape[0] //= ranks
        elif ROW.search(spec.name):
            shape[1] //= ranks
        assert shapes[spec.name] == tuple(shape), spec.name


def test_a_slice_has_the_layers_of_its_place_and_full_size() -> None:
    source = generated_model("k3-slice:8@tp8")
    assert source is not None and source.name == "k3-slice:8@tp8"
    config = source.config
    assert config.mla_layers == (3, 7) and config.moe_layers == tuple(range(8))
    assert (config.num_heads, config.hidden_size, config.num_experts, config.top_k) == (12, 7168, 896, 16)
    assert source.specs["language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed"].shape == (
        384,
        1792,
    )
    whole = generated_model("k3-slice:2")
    assert whole is not None
    experts = sum(spec.nbytes for name, spec in whole.specs.items() if "layers.1." in name)
    assert 15e9 < experts < 19e9, "about 16 GB a layer"


def test_dense_layers_come_with_a_slice_that_begins_before_them() -> None:
    assert slice_of(_tiny(), 2, first=0).moe_layers == (1,)
    assert slice_of(_tiny(), 2, first=4).moe_layers == (0, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("k3-slice:", "is no slice"),
        ("k3-slice:0", "is no slice"),
        ("k3-slice:4@tp0", "is no slice"),
        ("k3-slice:4@8", "is no slice"),
        ("k3-slice:-1", "is no slice"),
        ("k3-slice:٣", "is no slice"),
        ("k3-slice:90", "a slice of 90 layers.*from 1 to 89"),
        ("k3-slice:4@tp7", "7 ranks do not divide num_heads 96.*1, 2, 4, 8, 16"),
        ("k3-slice:4@tp64", "64 ranks do not divide num_heads 96"),
        ("random:", "is unknown.*random:kimi-linear-48b"),
        ("random:k3", "is unknown"),
    ],
)
def test_malformed_sources_are_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve_model(name)


def test_values_follow_from_seed_and_name_alone() -> None:
    first, again, other = _weights(_tiny_slice()), _weights(_tiny_slice()), _weights(_tiny_slice(seed=1))
    alike = [name for name in first if torch.equal(first[name], again[name])]
    assert len(alike) == len(first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert first["language_model.lm_head.weight"].dtype == torch.bfloat16
    layer = "language_model.model.layers.0."
    assert not torch.equal(first[f"{layer}self_attn.q_proj.weight"][:64], first[f"{layer}self_attn.k_proj.weight"][:64])


def test_values_are_distributed_as_a_checkpoint_s() -> None:
    weights = _weights(_tiny_slice())
    layer = "language_model.model.layers.0."
    norm, down = weights[f"{layer}input_layernorm.weight"].float(), weights[f"{layer}self_attn.o_proj.weight"].float()
    assert abs(norm.mean() - 1) < 0.03 and abs(norm.std() - 0.1) < 0.02
    assert abs(down.std() * down.shape[1] ** 0.5 - 0.15) < 0.01
    scales = weights[f"{layer}block_sparse_moe.experts.3.w1.weight_scale"].long() - 127
    assert scales.max() - scales.min() == 2 and -12 < int(scales.median()) < -2
    codes = weights[f"{layer}block_sparse_moe.experts.3.w1.weight_packed"]
    assert codes.unique().numel() == 256
    a_log = weights[f"{layer}self_attn.A_log"]
    assert a_log[:2].all() and not a_log[2:].any(), "two heads a rank, then padding"


def test_a_tensor_is_given_once_and_every_one_must_be() -> None:
    model = _tiny_slice()
    reader = GeneratedReader(model, "cpu", torch.float32)
    reader.get("language_model.lm_head.weight")
    with pytest.raises(K3HALError, match="loaded twice"):
        reader.get("language_model.lm_head.weight")
    with pytest.raises(K3HALError, match="does not promise"):
        reader.get("language_model.model.layers.4.input_layernorm.weight")
    with pytest.raises(K3HALError, match="one rank's part already"):
        reader.get("language_model.model.norm.weight", shard=Shard(0, 1, 2))
    with pytest.raises(K3HALError, match="never loaded"):
        reader.finish()


def test_an_engine_runs_a_rank_s_slice() -> None:
    built = build(_tiny_slice(), EngineOptions(device="cpu", dtype="float32", max_model_len=256))
    core, params = built.engine.core, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for name in tokens:
        core.add(EngineRequest(name, [5, 6, 7], params))
    while core.has_work:
        for output in core.step():
            assert output.finish_reason != "error", output.error
            tokens[output.request_id] += output.token_ids
    built.engine.close()
    assert tokens["a"] == tokens["b"] and len(tokens["a"]) == 6
    assert built.runner.arena.layout.heads == 2 and built.model_name == "tiny-slice:4@tp2"


def test_a_slice_without_mla_layers_continues_beyond_a_page() -> None:
    """Three KDA layers: whole, cut into chunks and split between two sequences, the same tokens follow."""
    model = GeneratedModel.of("tiny-slice:3@tp2", slice_of(_tiny(), 3, 2))
    prompt, answers = [(7 * i) % 300 for i in range(300)], []
    for options in ({}, {"max_num_batched_tokens": 64, "prefix_cache_policy": "none"}):
        built = build(model, EngineOptions(device="cpu", dtype="float32", max_model_len=512, **options))
        core, tokens = built.engine.core, {"a": [], "b": []}
        for name in tokens:
            core.add(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)))
        while core.has_work:
            for output in core.step():
                assert output.finish_reason != "error", output.error
                tokens[output.request_id] += output.token_ids
        built.engine.close()
        answers += tokens.values()
    assert len(answers[0]) == 5 and all(answer == answers[0] for answer in answers)


def test_a_whole_random_model_runs_and_repeats() -> None:
    with LLM("random:nano", device="cpu", dtype="float32", max_model_len=256) as model:
        logits = model.logits([5, 6, 7, 8])
    assert logits.isfinite().all() and 0.5 < logits.std() < 8
    with LLM("random:nano", device="cpu", dtype="float32", max_model_len=256) as model:
        assert torch.equal(model.logits([5, 6, 7, 8]), logits)


def test_what_does_not_fit_is_refused_with_the_size_before_anything_is_drawn() -> None:
    with pytest.raises(CapacityError, match=r"does not fit: \d+\.\d+ GB are missing. Weights 1\d\d\.\d"):
        LLM("k3-slice:9", device="cpu", memory_budget=8)


def test_kimi_linear_48b_has_its_published_size() -> None:
    source = open_model(resolve_model("random:kimi-linear-48b"), mla_latent_norm_eps=1e-5)
    config = source.config
    assert config.latent_norm_eps == 1e-5
    assert (config.num_layers, len(config.mla_layers), config.num_experts, config.top_k) == (27, 7, 256, 8)
    assert 97e9 < weight_bytes(source, torch.bfloat16) < 99e9
