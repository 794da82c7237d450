"""`expected_tensors`: the published totals, and the names, dtypes and shapes of small configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from k3hal.model.config import ModelConfig
from k3hal.model.manifest import accepted_dtypes, expected_tensors, layer_tensors
from k3hal.model.presets import preset_config


def test_published_totals(shared_data: Callable[[str], Path]) -> None:
    count = total = 0
    for spec in expected_tensors(ModelConfig.from_json(shared_data("kimi_k3_config.json"))):
        count += 1
        total += spec.nbytes
    assert (count, total) == (497_220, 1_560_860_324_864)


def test_published_names_and_shapes(shared_data: Callable[[str], Path]) -> None:
    config = ModelConfig.from_json(shared_data("kimi_k3_config.json"))
    specs = {spec.name: (spec.dtype, spec.shape) for spec in islice(layer_tensors(config, 1), 40)}
    at = "language_model.model.layers.1."
    assert specs[at + "self_attn.A_log"] == ("F32", (128,))  # 96 heads, padded
    assert specs[at + "self_attn.k_conv1d.weight"] == ("F32", (12288, 1, 4))
    assert specs[at + "self_attn.o_norm.weight"] == ("F32", (128,))
    assert specs[at + "self_attention_res_proj.weight"] == ("BF16", (1, 7168))
    assert specs[at + "block_sparse_moe.shared_experts.down_proj.weight"] == ("BF16", (7168, 6144))
    assert specs[at + "block_sparse_moe.experts.0.w2.weight_packed"] == ("U8", (3584, 1536))
    assert specs[at + "block_sparse_moe.experts.0.w2.weight_scale"] == ("U8", (3584, 96))


def test_every_tensor_of_a_reduced_k3(micro_config: dict[str, Any], vision_config: dict[str, Any]) -> None:
    specs = list(expected_tensors(ModelConfig.from_json(micro_config | {"vision_config": vision_config})))
    assert len({spec.name for spec in specs}) == len(specs)
    # 5 global; 8 common per layer; 12 per KDA and 6 per MLA layer; 3 dense; 8 + 6 per expert; vision 3 + 6 + 3.
    assert len(specs) == 5 + 3 * 8 - 3 * 2 + 2 * (12 + 2) + (6 + 2) + 3 + 2 * (8 + 4 * 6) + 3 + 6 + 3
    shapes = {spec.name: spec.shape for spec in specs}
    at = "language_model.model.layers.2."
    assert shapes[at + "self_attn.q_b_proj.weight"] == (2 * (16 + 8), 16)
    assert shapes[at + "self_attn.kv_a_proj_with_mqa.weight"] == (24 + 8, 32)
    assert shapes[at + "self_attn.kv_b_proj.weight"] == (2 * (16 + 12), 24)
    assert shapes[at + "self_attn.g_proj.weight"] == shapes[at + "self_attn.o_proj.weight"][::-1] == (24, 32)
    assert shapes[at + "block_sparse_moe.experts.3.w1.weight_packed"] == (32, 32)
    assert shapes[at + "block_sparse_moe.experts.3.w2.weight_scale"] == (64, 1)
    assert shapes["vision_tower.encoder.blocks.0.wqkv.weight"] == (36, 8)
    assert shapes["mm_projector.proj.2.weight"] == (32, 32)
    assert Counter(spec.is_vision for spec in specs)[True] == 12


def test_a_log_pads_heads_to_128(micro_config: dict[str, Any]) -> None:
    for heads, stored in ((1, 128), (128, 128), (129, 256)):
        micro_config["text_config"]["linear_attn_config"]["num_heads"] = heads
        assert ModelConfig.from_json(micro_config).a_log_shape == (stored,)


def test_kimi_linear_names() -> None:
    config = ModelConfig.from_json(preset_config("kl-tiny"))
    specs = {spec.name: spec for spec in expected_tensors(config)}
    names = {spec.name.removeprefix("model.layers.1.self_attn.") for spec in layer_tensors(config, 1)}
    assert {"g_a_proj.weight", "g_b_proj.weight"} <= names and "g_proj.weight" not in names
    assert specs["model.layers.3.self_attn.q_proj.weight"].shape == (4 * 192, 512)
    assert specs["model.layers.1.block_sparse_moe.experts.31.w2.weight"].shape == (512, 128)
    assert specs["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert "lm_head.weight" in specs
    assert not [name for name in specs if "_res_" in name or "routed_expert" in name or "q_a_proj" in name]
    assert accepted_dtypes(config, specs["model.layers.0.self_attn.A_log"]) == ("BF16", "F32")


def test_unquantised_k3_and_experts_without_latent(micro_config: dict[str, Any]) -> None:
    text = micro_config["text_config"]
    for key in ("quantization_config", "routed_expert_hidden_size", "use_grouped_topk"):
        del text[key]
    specs = {spec.name: spec for spec in expected_tensors(ModelConfig.from_json(micro_config))}
    expert = specs["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"]
    assert (expert.dtype, expert.shape) == ("BF16", (32, 32))
    assert not [name for name in specs if "routed_expert" in name]


def test_bytes_follow_dtype_and_shape(micro_config: dict[str, Any]) -> None:
    width = {"BF16": 2, "F32": 4, "U8": 1}
    for spec in expected_tensors(ModelConfig.from_json(micro_config)):
        assert spec.nbytes == prod(spec.shape) * width[spec.dtype]
