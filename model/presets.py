"""Small configurations in the published format, made to be generated from a seed."""

from __future__ import annotations

from typing import Any

from k3hal.model.content import Layout
from k3hal.model.synthetic_vocab import synthetic_ranks

PRESETS = ("nano", "tiny", "kl-tiny", "wide")

_BASE = len(synthetic_ranks())
"""Id of the first special token; 256 specials follow the vocabulary's last rank."""

BOS, END_OF_MSG, MEDIA_PAD, PAD, VOCAB = _BASE, _BASE + 2, _BASE + 21, _BASE + 255, _BASE + 256


def preset_config(name: str, layout: Layout = "published") -> dict[str, Any]:
    """The config.json of preset `name`, one of `PRESETS`. Where msModelSlim wrote the weights it does not say so."""
    config = _published(name)
    if layout == "modelslim":
        config.get("text_config", config).pop("quantization_config", None)
    return config


def _published(name: str) -> dict[str, Any]:
    if name == "nano":
        return _k3(_sizes(128, 8, heads=2, dense=256, experts=16, top_k=4, middle=64), q_lora=64, latent=64, block=3)
    if name == "tiny":
        return _k3(_tiny_sizes(experts=64), q_lora=128, latent=256, block=4)
    if name == "wide":
        # Rows of Kimi K3's own width, which kernels may be made for alone, and as many blocks of residuals as it has.
        return _k3(_sizes(7168, 8, heads=1, dense=128, experts=8, top_k=2, middle=64), q_lora=32, latent=128, block=1)
    if name == "kl-tiny":
        return _kimi_linear(_tiny_sizes(experts=32))
    raise KeyError(name)


def kimi_linear_48b() -> dict[str, Any]:
    """The sizes of Kimi-Linear-48B (spec k3_architecture §1.6) with the synthetic vocabulary's special tokens."""
    layers = 27
    full = [4, 8, 12, 16, 20, 24, 27]
    config = _kimi_linear(_sizes(2304, layers, heads=32, dense=9216, experts=256, top_k=8, middle=1024))
    config |= {"vocab_size": 163840, "model_max_length": 1048576}
    kda = [i for i in range(1, layers + 1) if i not in full]
    config["linear_attn_config"] |= {"full_attn_layers": full, "kda_layers": kda}
    return config


def shard_limit(name: str) -> int:
    """Largest data size of one shard in bytes: small enough that every preset has several shards."""
    return 2 << 20 if name == "nano" else 32 << 20


def _tiny_sizes(experts: int) -> dict[str, Any]:
    return _sizes(512, 16, heads=4, dense=1024, experts=experts, top_k=8, middle=128)


def _sizes(
    hidden: int, layers: int, *, heads: int, dense: int, experts: int, top_k: int, middle: int
) -> dict[str, Any]:
    """Keys that both architectures spell alike."""
    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i >= layers - 1]
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": dense,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": experts,
        "num_experts_per_token": top_k,
        "moe_intermediate_size": middle,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
            "head_dim": 128,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
        },
    }


def _special_ids() -> dict[str, int]:
    return {"bos_token_id": BOS, "eos_token_id": END_OF_MSG, "pad_token_id": PAD}


def _k3(text: dict[str, Any], *, q_lora: int, latent: int, block: int) -> dict[str, Any]:
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **text,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "max_position_embeddings": 131072,
        "q_lora_rank": q_lora,
        "mla_use_output_gate": True,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": latent,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": block,
        "quantization_config": _mxfp4(),
    }
    text["linear_attn_config"] |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **_special_ids(),
        "media_placeholder_token_id": MEDIA_PAD,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def _kimi_linear(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **_special_ids(),
        "tie_word_embeddings": False,
        **sizes,
        "hidden_act": "silu",
        "model_max_length": 131072,
        "q_lora_rank": None,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
    }


def _mxfp4() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": 32,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": "torch.uint8",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }
