"""Every tensor a checkpoint must hold, derived from its config: names, stored dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from k3hal.model.config import MXFP4_GROUP, ModelConfig

StoredDtype = Literal["BF16", "F32", "U8", "I8"]

DTYPE_BYTES: dict[str, int] = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1}
"""Bytes an element takes, by the name a safetensors header gives the dtype."""

VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class TensorSpec(NamedTuple):
    """One tensor as the checkpoint stores it; `shape` counts stored elements (two MXFP4 codes a byte)."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_vision(self) -> bool:
        return self.name.startswith(VISION_PREFIXES)


def expected_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors of a checkpoint with this config, vision included when the config has a vision part. Lazy."""
    yield from _global(config)
    for layer in range(config.num_layers):
        yield from layer_tensors(config, layer)
    yield from vision_tensors(config)


_BESIDE_CODES = (".weight_scale", ".weight_offset", ".scale_bias")


def accepted_dtypes(config: ModelConfig, spec: TensorSpec) -> tuple[str, ...]:
    """Stored dtypes that load as `spec`.

    The K3 layout is exact. Kimi-Linear files come from several exporters, so their float tensors may be either
    bfloat16 or float32, and so may what msModelSlim leaves beside its codes; what a tensor becomes in memory follows
    `spec` alone.
    """
    whole = spec.dtype in ("U8", "I8")
    if not whole and (config.architecture == "kimi_linear" or spec.name.endswith(_BESIDE_CODES)):
        return ("BF16", "F32")
    return (spec.dtype,)


def layer_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Tensors of one 0-based layer."""
    at = f"{config.prefix}layers.{layer}."
    hidden = config.hidden_size
    yield _bf16(at + "input_layernorm.weight", hidden)
    yield _bf16(at + "post_attention_layernorm.weight", hidden)
    if config.attn_res_block_size is not None:
        for kind in ("self_attention", "mlp"):
            yield _bf16(f"{at}{kind}_res_norm.weight", hidden)
            yield _bf16(f"{at}{kind}_res_proj.weight", 1, hidden)
    attention = _kda if config.is_kda(layer) else _mla
    yield from attention(config, at + "self_attn.")
    if config.is_moe(layer):
        yield from _moe(config, at + "block_sparse_moe.")
    else:
        yield from _gated_mlp(at + "mlp.", hidden, config.intermediate_size)


def _bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "BF16", shape)


def _f32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "F32", shape)


def _global(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield _bf16(config.prefix + "embed_tokens.weight", config.vocab_size, hidden)
    yield _bf16(config.prefix + "norm.weight", hidden)
    if config.attn_res_block_size is not None:
        yield _bf16(config.prefix + "output_attn_res_norm.weight", hidden)
        yield _bf16(config.prefix + "output_attn_res_proj.weight", 1, hidden)
    yield _bf16(config.lm_head_name, config.vocab_size, hidden)


def _kda(config: ModelConfig, at: str) -> Iterator[TensorSpec]:
    hidden, dim = config.hidden_size, config.kda_head_dim
    width = config.kda_heads * dim
    for name in ("q", "k", "v"):
        yield _bf16(f"{at}{name}_proj.weight", width, hidden)
        yield _f32(f"{at}{name}_conv1d.weight", width, 1, config.conv_width)
    yield _bf16(at + "b_proj.weight", config.kda_heads, hidden)
    yield _bf16(at + "f_a_proj.weight", dim, hidden)
    yield _bf16(at + "f_b_proj.weight", width, dim)
    if config.full_rank_gate:
        yield _bf16(at + "g_proj.weight", width, hidden)
    else:
        yield _bf16(at + "g_a_proj.weight", dim, hidden)
        yield _bf16(at + "g_b_proj.weight", width, dim)
    yield _f32(at + "A_log", *config.a_log_shape)
    yield _f32(at + "dt_bias", width)
    yield _f32(at + "o_norm.weight", dim)
    yield _bf16(at + "o_proj.weight", hidden, width)


def _mla(config: ModelConfig, at: str) -> Iterator[TensorSpec]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    if config.q_lora_rank is None:
        yield _bf16(at + "q_proj.weight", heads * config.qk_head_dim, hidden)
    else:
        yield _bf16(at + "q_a_proj.weight", config.q_lora_rank, hidden)
        yield _bf16(at + "q_a_layernorm.weight", config.q_lora_rank)
        yield _bf16(at + "q_b_proj.weight", heads * config.qk_head_dim, config.q_lora_rank)
    yield _bf16(at + "kv_a_proj_with_mqa.weight", rank + config.qk_rope_head_dim, hidden)
    yield _bf16(at + "kv_a_layernorm.weight", rank)
    yield _bf16(at + "kv_b_proj.weight", heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
    if config.mla_output_gate:
        yield _bf16(at + "g_proj.weight", heads * config.v_head_dim, hidden)
    yield _bf16(at + "o_proj.weight", hidden, heads * config.v_head_dim)


def _gated_mlp(at: str, width: int, intermediate: int) -> Iterator[TensorSpec]:
    yield _bf16(at + "gate_proj.weight", intermediate, width)
    yield _bf16(at + "up_proj.weight", intermediate, width)
    yield _bf16(at + "down_proj.weight", width, intermediate)


def _moe(config: ModelConfig, at: str) -> Iterator[TensorSpec]:
    hidden, width = config.hidden_size, config.expert_width
    yield _bf16(at + "gate.weight", config.num_experts, hidden)
    yield _f32(at + "gate.e_score_correction_bias", config.num_experts)
    if config.latent_size is not None:
        yield _bf16(at + "routed_expert_down_proj.weight", width, hidden)
        if config.latent_norm:
            yield _bf16(at + "routed_expert_norm.weight", width)
        yield _bf16(at + "routed_expert_up_proj.weight", hidden, width)
    yield from _gated_mlp(at + "shared_experts.", hidden, config.shared_intermediate_size)
    for expert in range(config.num_experts):
        yield from _expert(config, f"{at}experts.{expert}.")


def _expert(config: ModelConfig, at: str) -> Iterator[TensorSpec]:
    width, middle = config.expert_width, config.moe_intermediate_size
    for name, rows, columns in (("w1", middle, width), ("w2", width, middle), ("w3", middle, width)):
        if config.expert_format == "mxfp4":
            yield TensorSpec(f"{at}{name}.weight_packed", "U8", (rows, columns // 2))
            yield TensorSpec(f"{at}{name}.weight_scale", "U8", (rows, columns // MXFP4_GROUP))
        else:
            yield _bf16(f"{at}{name}.weight", rows, columns)


def vision_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Tensors of the vision tower and projector; none when the config has no vision part."""
    vision = config.vision
    if vision is None:
        return
    hidden, at = vision.hidden_size, "vision_tower."
    yield _bf16(at + "patch_embed.proj.weight", hidden, 3, vision.patch_size, vision.patch_size)
    yield _bf16(at + "patch_embed.pos_emb.weight", vision.pos_height, vision.pos_width, hidden)
    for block in range(vision.num_layers):
        inside = f"{at}encoder.blocks.{block}."
        yield _bf16(inside + "norm0.weight", hidden)
        yield _bf16(inside + "norm1.weight", hidden)
        yield _bf16(inside + "wqkv.weight", 3 * vision.qkv_size, hidden)
        yield _bf16(inside + "wo.weight", hidden, vision.qkv_size)
        yield _bf16(inside + "mlp.fc0.weight", vision.intermediate_size, hidden)
        yield _bf16(inside + "mlp.fc1.weight", hidden, vision.intermediate_size)
    yield _bf16(at + "encoder.final_layernorm.weight", hidden)
    merged = vision.mm_hidden_size * vision.merge[0] * vision.merge[1]
    yield _bf16("mm_projector.proj.0.weight", merged, merged)
    yield _bf16("mm_projector.proj.2.weight", vision.text_hidden_size, merged)
    yield _bf16("mm_projector.post_norm.weight", vision.text_hidden_size)
