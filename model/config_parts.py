"""The parts of config.json that need more than one typed read: layer kinds, expert format, vision sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from k3hal.dispatch.errors import ConfigError
from k3hal.model.config_fields import Fields

ExpertFormat = Literal["mxfp4", "bf16", "int4"]
"""`int4` is msModelSlim's, of which config.json says nothing."""
ExpertActivations = Literal["auto", "mxfp8"]
"""What the routed experts' products make of their activations: nothing, or MXFP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes that decide the vision tensors' shapes."""

    patch_size: int
    pos_height: int
    pos_width: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    qkv_size: int
    merge: tuple[int, int]
    mm_hidden_size: int
    text_hidden_size: int


def vision_config(top: Fields) -> VisionConfig | None:
    if not top.has("vision_config"):
        return None
    vision = top.child("vision_config")
    merge = vision.integers("merge_kernel_size", low=1, high=64)
    if len(merge) != 2:
        raise vision.fail("merge_kernel_size", "two integers")
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        if vision.boolean(key, default=False):
            raise vision.fail(key, "false: the published tower has no biases")
    return VisionConfig(
        patch_size=vision.integer("patch_size"),
        pos_height=vision.integer("init_pos_emb_height"),
        pos_width=vision.integer("init_pos_emb_width"),
        hidden_size=vision.integer("vt_hidden_size"),
        num_layers=vision.integer("vt_num_hidden_layers", high=1000),
        intermediate_size=vision.integer("vt_intermediate_size"),
        qkv_size=vision.integer("qkv_hidden_size"),
        merge=(merge[0], merge[1]),
        mm_hidden_size=vision.integer("mm_hidden_size"),
        text_hidden_size=vision.integer("text_hidden_size"),
    )


def expert_format(top: Fields, text: Fields) -> ExpertFormat:
    """`mxfp4` for the one published quantisation, `bf16` where none is declared; anything else is an error.

    Only routed experts are quantised, whatever the config's ignore list names (k3_architecture.md §1.3).
    """
    holder = text if text.has("quantization_config") else top
    if not holder.has("quantization_config"):
        return "bf16"
    quant = holder.child("quantization_config")
    quant.choice("quant_method", among=("compressed-tensors",))
    quant.choice("format", among=("mxfp4-pack-quantized",))
    groups = quant.child("config_groups")
    if len(groups.data) != 1:
        raise quant.fail("config_groups", "one group")
    group = groups.child(next(iter(groups.data)))
    weights = group.child("weights")
    weights.integer("num_bits", low=4, high=4)
    weights.choice("type", among=("float",))
    weights.integer("group_size", low=32, high=32)
    weights.choice("strategy", among=("group",), default="group")
    if not weights.boolean("symmetric", default=True):
        raise weights.fail("symmetric", "true: the format has no zero points")
    group.require_absent("input_activations", "activations are not quantised by the checkpoint")
    quant.require_absent("kv_cache_scheme", "the cache's dtype is an option of the engine")
    return "mxfp4"


def kda_layers(nested: Fields, text: Fields, num_layers: int) -> tuple[int, ...]:
    """0-based KDA layers, ascending.

    The published files list both kinds 1-based; transformers writes `layer_types`. Raises `ConfigError` unless every
    layer has exactly one kind.
    """
    if not nested.has("kda_layers", "full_attn_layers") and text.has("layer_types"):
        kinds = _kinds(text, "layer_types", ("linear_attention", "full_attention"), num_layers)
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    kda = nested.integers("kda_layers", low=1, high=num_layers)
    full = nested.integers("full_attn_layers", low=1, high=num_layers)
    for layer in range(1, num_layers + 1):
        count = kda.count(layer) + full.count(layer)
        if count != 1:
            raise ConfigError(
                f"{nested.where}kda_layers and full_attn_layers name layer {layer} (1-based) {count} times; "
                f"expected each of the {num_layers} layers exactly once"
            )
    return tuple(sorted(layer - 1 for layer in kda))


def moe_layout(text: Fields, num_layers: int) -> dict[str, Any]:
    """`first_k_dense` and `moe_layer_freq`: dense layers first, then every `moe_layer_freq`-th layer has experts."""
    if not text.has("first_k_dense_replace") and text.has("mlp_layer_types"):
        kinds = _kinds(text, "mlp_layer_types", ("dense", "sparse"), num_layers)
        first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if "dense" in kinds[first:]:
            raise text.fail("mlp_layer_types", "dense layers before sparse ones only")
        return {"first_k_dense": first, "moe_layer_freq": 1}
    return {
        "first_k_dense": text.integer("first_k_dense_replace", low=0),
        "moe_layer_freq": text.integer("moe_layer_freq") if text.has("moe_layer_freq") else 1,
    }


def _kinds(text: Fields, key: str, among: tuple[str, str], count: int) -> list[str]:
    kinds = text.value(key)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in among for kind in kinds):
        raise text.fail(key, f"{count} entries, each {among[0]!r} or {among[1]!r}")
    return kinds
