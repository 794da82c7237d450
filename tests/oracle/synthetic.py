"""Random checkpoints in the published layout, made without any code of the repo, for checking the oracle itself."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_MXFP4: Config = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "kv_cache_scheme": None,
}


def kimi_linear_config() -> Config:
    """A flat Kimi-Linear config: 5 layers (MLA at 1-based 4 and 5), the second layer dense too, 12 experts top-3."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "model_max_length": 4096,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "num_experts": 12,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "bos_token_id": 90,
        "eos_token_id": 91,
        "pad_token_id": 95,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4, 5],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }


def k3_config() -> Config:
    """A nested K3 config: 6 layers, AttnRes blocks of 2, MLA at 1-based 3, 5 and 6, 8 latent experts top-3 in MXFP4."""
    text = kimi_linear_config()
    del text["dtype"]
    text |= {
        "num_hidden_layers": 6,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "q_lora_rank": 48,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "attn_res_block_size": 2,
        "quantization_config": _MXFP4,
    }
    text["linear_attn_config"] |= {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5, 6],
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
    }


@dataclass(frozen=True)
class _Maker:
    """Draws tensors from one generator; scales keep activations near one, so that every term shows in the logits."""

    generator: torch.Generator
    tensors: Tensors

    def normal(self, name: str, *shape: int, scale: float, mean: float = 0.0, dtype: torch.dtype) -> None:
        value = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + mean
        self.tensors[name] = value.to(dtype)

    def linear(self, name: str, rows: int, columns: int) -> None:
        self.normal(f"{name}.weight", rows, columns, scale=columns**-0.5, dtype=torch.bfloat16)

    def norm(self, name: str, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.normal(f"{name}.weight", width, scale=0.2, mean=1.0, dtype=dtype)

    def mxfp4(self, name: str, rows: int, columns: int) -> None:
        draw = {"generator": self.generator, "dtype": torch.uint8}
        self.tensors[f"{name}.weight_packed"] = torch.randint(0, 256, (rows, columns // 2), **draw)
        self.tensors[f"{name}.weight_scale"] = torch.randint(122, 126, (rows, columns // 32), **draw)


def random_tensors(config: Config, seed: int) -> Tensors:
    """All tensors of a checkpoint of `config` under their published names, dtypes as published."""
    text: Config = config.get("text_config", config)
    root = "language_model." if "text_config" in config else ""
    make = _Maker(torch.Generator().manual_seed(seed), {})
    hidden = text["hidden_size"]
    make.normal(f"{root}model.embed_tokens.weight", text["vocab_size"], hidden, scale=1.0, dtype=torch.bfloat16)
    make.linear(f"{root}lm_head", text["vocab_size"], hidden)
    make.norm(f"{root}model.norm", hidden)
    if "attn_res_block_size" in text:
        _attn_res(make, f"{root}model.output_attn_res", hidden)
    for index in range(text["num_hidden_layers"]):
        layer = f"{root}model.layers.{index}"
        make.norm(f"{layer}.input_layernorm", hidden)
        make.norm(f"{layer}.post_attention_layernorm", hidden)
        if "attn_res_block_size" in text:
            _attn_res(make, f"{layer}.self_attention_res", hidden)
            _attn_res(make, f"{layer}.mlp_res", hidden)
        if index + 1 in text["linear_attn_config"]["kda_layers"]:
            _kda(make, text, f"{layer}.self_attn")
        else:
            _mla(make, text, f"{layer}.self_attn")
        if index < text["first_k_dense_replace"]:
            _mlp(make, f"{layer}.mlp", hidden, text["intermediate_size"])
        else:
            _moe(make, text, f"{layer}.block_sparse_moe")
    return make.tensors


def _attn_res(make: _Maker, name: str, hidden: int) -> None:
    make.norm(f"{name}_norm", hidden)
    make.linear(f"{name}_proj", 1, hidden)


def _mlp(make: _Maker, name: str, width: int, intermediate: int) -> None:
    make.linear(f"{name}.gate_proj", intermediate, width)
    make.linear(f"{name}.up_proj", intermediate, width)
    make.linear(f"{name}.down_proj", width, intermediate)


def _kda(make: _Maker, text: Config, name: str) -> None:
    linear = text["linear_attn_config"]
    hidden, heads, dim = text["hidden_size"], linear["num_heads"], linear["head_dim"]
    inner = heads * dim
    for part in ("q", "k", "v"):
        make.linear(f"{name}.{part}_proj", inner, hidden)
        make.normal(f"{name}.{part}_conv1d.weight", inner, 1, 4, scale=0.5, dtype=torch.float32)
    make.linear(f"{name}.b_proj", heads, hidden)
    make.linear(f"{name}.f_a_proj", dim, hidden)
    make.linear(f"{name}.f_b_proj", inner, dim)
    if linear.get("use_full_rank_gate"):
        make.linear(f"{name}.g_proj", inner, hidden)
    else:
        make.linear(f"{name}.g_a_proj", dim, hidden)
        make.linear(f"{name}.g_b_proj", inner, dim)
    make.normal(f"{name}.A_log", heads, scale=0.7, dtype=torch.float32)
    a_log = make.tensors[f"{name}.A_log"]
    if "gate_lower_bound" in linear:
        make.tensors[f"{name}.A_log"] = torch.cat([a_log, torch.zeros(-heads % 128)])
    else:
        make.tensors[f"{name}.A_log"] = a_log.reshape(1, 1, heads, 1)
    make.normal(f"{name}.dt_bias", inner, scale=1.0, mean=-2.0, dtype=torch.float32)
    make.norm(f"{name}.o_norm", dim, torch.float32)
    make.linear(f"{name}.o_proj", hidden, inner)


def _mla(make: _Maker, text: Config, name: str) -> None:
    hidden, heads, latent = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    if text.get("q_lora_rank"):
        make.linear(f"{name}.q_a_proj", text["q_lora_rank"], hidden)
        make.norm(f"{name}.q_a_layernorm", text["q_lora_rank"])
        make.linear(f"{name}.q_b_proj", heads * (nope + rope), text["q_lora_rank"])
    else:
        make.linear(f"{name}.q_proj", heads * (nope + rope), hidden)
    make.linear(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
    make.norm(f"{name}.kv_a_layernorm", latent)
    make.linear(f"{name}.kv_b_proj", heads * (nope + value), latent)
    if text.get("mla_use_output_gate"):
        make.linear(f"{name}.g_proj", heads * value, hidden)
    make.linear(f"{name}.o_proj", hidden, heads * value)


def _moe(make: _Maker, text: Config, name: str) -> None:
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    make.linear(f"{name}.gate", experts, hidden)
    make.normal(f"{name}.gate.e_score_correction_bias", experts, scale=0.1, dtype=torch.float32)
    _mlp(make, f"{name}.shared_experts", hidden, inner * text["num_shared_experts"])
    latent = text.get("routed_expert_hidden_size")
    if latent:
        make.linear(f"{name}.routed_expert_down_proj", latent, hidden)
        make.norm(f"{name}.routed_expert_norm", latent)
        make.linear(f"{name}.routed_expert_up_proj", hidden, latent)
    draw = make.mxfp4 if latent else make.linear
    width = latent or hidden
    for expert in range(experts):
        draw(f"{name}.experts.{expert}.w1", inner, width)
        draw(f"{name}.experts.{expert}.w3", inner, width)
        draw(f"{name}.experts.{expert}.w2", width, inner)


def write_checkpoint(directory: Path, config: Config, tensors: Tensors, shards: int = 1) -> None:
    """Write config.json and `shards` safetensors files with their index, tensors dealt round-robin by sorted name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    names = sorted(tensors)
    files = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    weight_map = {name: files[position % shards] for position, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n].contiguous() for n in names if weight_map[n] == file}, directory / file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
