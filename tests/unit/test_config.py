"""`ModelConfig`: the published files read as they are, and every mistake is one line naming key, value, expectation."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import ConfigError
from k3hal.model.config import ModelConfig
from k3hal.model.presets import preset_config


def test_published_k3_config(shared_data: Callable[[str], Path]) -> None:
    config = ModelConfig.from_json(shared_data("kimi_k3_config.json"))
    assert config.architecture == "kimi_k3"  # although the nested text_config calls itself kimi_linear
    assert (config.num_layers, config.hidden_size, config.num_heads, config.kda_heads) == (93, 7168, 96, 96)
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert config.moe_layers == tuple(range(1, 93))
    assert (config.num_experts, config.top_k, config.latent_size, config.latent_norm) == (896, 16, 3584, True)
    assert (config.activation, config.situ_beta, config.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert (config.gate_lower_bound, config.full_rank_gate, config.mla_output_gate) == (-5.0, True, True)
    assert (config.expert_format, config.attn_res_block_size, config.has_vision) == ("mxfp4", 12, True)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.a_log_shape == (128,)
    assert (config.latent_norm_eps, config.rms_norm_eps) == (1e-6, 1e-5)


def test_absent_keys_of_the_48b_form_switch_features_off() -> None:
    config = ModelConfig.from_json(preset_config("kl-tiny"))
    assert config.architecture == "kimi_linear"
    assert config.q_lora_rank is None
    assert config.latent_size is None and not config.latent_norm
    assert config.attn_res_block_size is None
    assert config.gate_lower_bound is None
    assert not config.full_rank_gate and not config.mla_output_gate
    assert (config.activation, config.expert_format) == ("silu", "bf16")
    assert (config.prefix, config.lm_head_name) == ("model.", "lm_head.weight")
    assert config.a_log_shape == (1, 1, 4, 1)
    assert config.expert_width == config.hidden_size


def test_transformers_own_spelling_means_the_same() -> None:
    """transformers flattens `linear_attn_config` and writes `layer_types` and `mlp_layer_types`."""
    published = preset_config("kl-tiny")
    linear = published.pop("linear_attn_config")
    flat = published | {
        "linear_num_heads": linear["num_heads"],
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "layer_types": [
            "full_attention" if i + 1 in linear["full_attn_layers"] else "linear_attention" for i in range(16)
        ],
        "mlp_layer_types": ["dense", *["sparse"] * 15],
        "max_position_embeddings": published["model_max_length"],
        "num_local_experts": published["num_experts"],
        "num_experts_per_tok": published["num_experts_per_token"],
        "n_shared_experts": published["num_shared_experts"],
        "norm_topk_prob": published["moe_renormalize"],
        "n_group": 1,
    }
    for key in ("first_k_dense_replace", "model_max_length", "num_experts", "num_experts_per_token"):
        del flat[key]
    for key in ("num_shared_experts", "moe_renormalize", "num_expert_group", "moe_layer_freq"):
        del flat[key]
    assert ModelConfig.from_json(flat) == ModelConfig.from_json(preset_config("kl-tiny"))


def test_latent_norm_eps_is_the_loaders_option() -> None:
    assert ModelConfig.from_json(preset_config("nano"), mla_latent_norm_eps=1e-5).latent_norm_eps == 1e-5
    with pytest.raises(ConfigError, match="mla_latent_norm_eps is -1"):
        ModelConfig.from_json(preset_config("nano"), mla_latent_norm_eps=-1)


def test_more_dense_layers_and_expert_frequency(micro_config: dict[str, Any]) -> None:
    text = micro_config["text_config"]
    text["first_k_dense_replace"] = 2
    assert ModelConfig.from_json(micro_config).moe_layers == (2,)
    text |= {"first_k_dense_replace": 0, "moe_layer_freq": 2}
    assert ModelConfig.from_json(micro_config).moe_layers == (0, 2)


def test_several_end_of_sequence_ids(micro_config: dict[str, Any]) -> None:
    config = ModelConfig.from_json(micro_config | {"eos_token_id": [371, 370]})
    assert config.eos_token_ids == (371, 370) and config.eos_token_id == 371


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys; import k3hal.model.config, k3hal.model.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


DELETE = object()

MALFORMED: list[tuple[str, Any, str]] = [
    ("model_type", "llama", r"model_type is 'llama'; expected 'kimi_k3' or 'kimi_linear'"),
    ("model_type", DELETE, r"model_type is missing; expected 'kimi_k3' or 'kimi_linear'"),
    ("text_config", [1], r"text_config is \[1\]; expected an object"),
    ("text_config.hidden_size", -1, r"text_config.hidden_size is -1; expected an integer of at least 1"),
    ("text_config.hidden_size", 64.5, r"hidden_size is 64.5; expected an integer"),
    ("text_config.hidden_size", True, r"hidden_size is True; expected an integer"),
    ("text_config.hidden_size", DELETE, r"text_config.hidden_size is missing; expected an integer"),
    ("text_config.vocab_size", 0, r"vocab_size is 0; expected an integer of at least 1"),
    ("text_config.num_hidden_layers", 10**9, r"num_hidden_layers is 1000000000; expected an integer from 1 to 1000"),
    ("text_config.num_hidden_layers", 4, r"name layer 4 \(1-based\) 0 times; expected each of the 4 layers"),
    ("text_config.linear_attn_config.kda_layers", [1, 3], r"name layer 2 \(1-based\) 0 times"),
    ("text_config.linear_attn_config.kda_layers", [1, 2, 3], r"name layer 3 \(1-based\) 2 times"),
    ("text_config.linear_attn_config.kda_layers", [0, 1, 2], r"kda_layers holds 0; expected integers from 1 to 3"),
    ("text_config.linear_attn_config.kda_layers", "1,2", r"kda_layers is '1,2'; expected a list of integers"),
    ("text_config.linear_attn_config.head_dim", 16, r"head_dim is 16; expected an integer from 32 to 256"),
    ("text_config.linear_attn_config.head_dim", 512, r"head_dim is 512; expected an integer from 32 to 256"),
    ("text_config.linear_attn_config.short_conv_kernel_size", 1, r"short_conv_kernel_size is 1; expected"),
    (
        "text_config.linear_attn_config.gate_lower_bound",
        5.0,
        r"gate_lower_bound is 5.0; expected a finite number below",
    ),
    ("text_config.linear_attn_config", DELETE, r"text_config.linear_num_heads is missing"),
    ("text_config.num_key_value_heads", 1, r"num_key_value_heads is 1; expected num_attention_heads, 2"),
    ("text_config.hidden_act", "gelu", r"hidden_act is 'gelu'; expected 'situ' or 'silu'"),
    ("text_config.activation_situ_beta", 0.0, r"activation_situ_beta is 0.0; expected a finite number above 0"),
    ("text_config.activation_situ_beta", DELETE, r"activation_situ_beta is missing"),
    ("text_config.rms_norm_eps", "1e-5", r"rms_norm_eps is '1e-5'; expected a number between 0 and 1"),
    ("text_config.rms_norm_eps", float("nan"), r"rms_norm_eps is nan; expected a number between 0 and 1"),
    ("text_config.routed_scaling_factor", 10**400, r"routed_scaling_factor is 1000.*; expected a finite number"),
    ("text_config.mla_use_nope", False, r"mla_use_nope is False; expected true"),
    ("text_config.rope_scaling", {"type": "yarn"}, r"rope_scaling is .*; expected no such key"),
    ("text_config.attention_bias", True, r"attention_bias is True; expected false"),
    ("text_config.num_nextn_predict_layers", 1, r"num_nextn_predict_layers is 1; expected an integer from 0 to 0"),
    (
        "text_config.moe_router_activation_func",
        "softmax",
        r"moe_router_activation_func is 'softmax'; expected 'sigmoid'",
    ),
    ("text_config.topk_method", "greedy", r"topk_method is 'greedy'; expected 'noaux_tc'"),
    ("text_config.num_expert_group", 8, r"num_expert_group is 8; expected an integer from 1 to 1"),
    ("text_config.num_experts_per_token", 5, r"num_experts_per_token is 5; expected an integer from 1 to 4"),
    ("text_config.num_experts", 10**9, r"num_experts is 1000000000; expected an integer from 1 to 65536"),
    ("text_config.num_shared_experts", 0, r"num_shared_experts is 0; expected an integer of at least 1"),
    ("text_config.moe_intermediate_size", 40, r"moe_intermediate_size is 40; expected a multiple of 32"),
    ("text_config.routed_expert_hidden_size", 40, r"routed_expert_hidden_size is 40; expected a multiple of 32"),
    ("text_config.moe_renormalize", "yes", r"moe_renormalize is 'yes'; expected true or false"),
    ("text_config.quantization_config.quant_method", "awq", r"quant_method is 'awq'; expected 'compressed-tensors'"),
    ("text_config.quantization_config.format", "nvfp4", r"format is 'nvfp4'; expected 'mxfp4-pack-quantized'"),
    ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, r"group_size is 16; expected"),
    ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8, r"num_bits is 8; expected"),
    ("text_config.quantization_config.config_groups", {}, r"config_groups is \{\}; expected one group"),
    (
        "text_config.quantization_config.kv_cache_scheme",
        {"num_bits": 8},
        r"kv_cache_scheme is .*; expected no such key",
    ),
    ("tie_word_embeddings", True, r"tie_word_embeddings is True; expected false"),
    ("eos_token_id", 625, r"eos_token_id is 625; expected an integer from 0 to 624"),
    ("eos_token_id", [1, -1], r"eos_token_id holds -1; expected integers from 0 to 624"),
    ("bos_token_id", "a", r"bos_token_id is 'a'; expected an integer"),
    ("vision_config", {"patch_size": 14}, r"vision_config.merge_kernel_size is missing"),
]


def _set(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    *parents, last = path.split(".")
    target = changed
    for key in parents:
        target = target[key]
    if value is DELETE:
        del target[last]
    else:
        target[last] = value
    return changed


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED, ids=[f"{p}={v!r:.20}" for p, v, _ in MALFORMED])
def test_malformed_config_is_one_named_line(micro_config: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_json(_set(micro_config, path, value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


MALFORMED_FILES = {
    "absent": (None, "cannot read .*config.json: No such file"),
    "not json": (b"{", "is not valid JSON"),
    "not utf-8": (b'{"a": "\xff"}', "is not valid JSON"),
    "a list": (b"[]", "holds a JSON list; expected an object"),
    "too deep": (b'{"a":' * 100_000, "is not valid JSON"),
    "empty": (b"", "is not valid JSON"),
}


@pytest.mark.parametrize("case", MALFORMED_FILES)
def test_malformed_config_file(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED_FILES[case]
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(tmp_path / "config.json")


def _paths(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [at]
    inner = [path for key, item in value.items() for path in _paths(item, (*at, key))]
    return [at, *inner] if at else inner


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5))
JSON = st.recursive(SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=3), x, max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_gives_a_config_or_a_config_error(data: st.DataObject) -> None:
    original = preset_config(data.draw(st.sampled_from(["nano", "kl-tiny"])))
    path = data.draw(st.sampled_from(_paths(original)))
    damaged = _set(original, ".".join(path), data.draw(JSON))
    message = ""
    try:
        config = ModelConfig.from_json(damaged)
        assert len(config.kda_layers) + len(config.mla_layers) == config.num_layers
    except ConfigError as error:
        message = error.message
    assert "\n" not in message


def test_the_file_is_named(tmp_path: Path, micro_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(micro_config | {"model_type": "x"}))
    with pytest.raises(ConfigError, match=r"config.json: model_type is 'x'"):
        ModelConfig.from_json(tmp_path)
