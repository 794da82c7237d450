"""The shape of a model, read from the published config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from k3hal.dispatch.errors import ConfigError, UnsupportedError
from k3hal.model.config_fields import Fields, read_json_object
from k3hal.model.config_parts import (
    ExpertActivations,
    ExpertFormat,
    VisionConfig,
    expert_format,
    kda_layers,
    moe_layout,
    vision_config,
)
from k3hal.model.layout import SLIM_DESCRIPTION

Architecture = Literal["kimi_k3", "kimi_linear"]
Activation = Literal["situ", "silu"]

MXFP4_GROUP = 32
"""Elements that share one E8M0 scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the model text needs to know; layers are 0-based.

    A feature that a config does not name is off: `attn_res_block_size` None is a plain pre-norm residual,
    `gate_lower_bound` None the softplus decay, `latent_size` None experts on the full width, `q_lora_rank` None a
    direct query projection, `full_rank_gate` False the low-rank output gate, `mla_output_gate` False no gate.
    `latent_norm_eps` belongs to `q_a_layernorm` and `kv_a_layernorm` and is a loader's option, not a key of the file;
    so is `expert_activations`, which `with_expert_activations` sets.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    situ_beta: float
    situ_linear_beta: float
    rms_norm_eps: float
    latent_norm_eps: float
    initializer_range: float
    max_position_embeddings: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    num_experts: int
    top_k: int
    num_shared_experts: int
    moe_intermediate_size: int
    latent_size: int | None
    latent_norm: bool
    first_k_dense: int
    moe_layer_freq: int
    renormalize: bool
    routed_scaling_factor: float
    attn_res_block_size: int | None
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    full_rank_gate: bool
    gate_lower_bound: float | None
    kda_layers: tuple[int, ...]
    expert_format: ExpertFormat
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    vision: VisionConfig | None
    expert_activations: ExpertActivations = "auto"

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | Path, *, mla_latent_norm_eps: float = 1e-6) -> ModelConfig:
        """The config of a parsed config.json, of such a file, or of a directory that holds one. Where msModelSlim wrote
        the directory its experts are int4, which the file does not say.

        Raises `ConfigError`, one line naming the key, its value and what is expected.
        """
        if isinstance(source, Mapping):
            data, origin, slim = source, "", False
        else:
            path = Path(source)
            slim = (path / SLIM_DESCRIPTION).is_file()
            path = path / "config.json" if path.is_dir() else path
            data, origin = read_json_object(path), f"{path}: "
        try:
            config = _parse(Fields(data), mla_latent_norm_eps)
            return replace(config, expert_format="int4") if slim else config
        except ConfigError as error:
            raise ConfigError(origin + error.message, hint=error.hint) from error

    def with_expert_activations(self, chosen: ExpertActivations) -> ModelConfig:
        """The same model with routed experts that round their activations as `chosen`.

        Raises `UnsupportedError` where no operator does that: MXFP8 is for experts stored as MXFP4.
        """
        if chosen == "mxfp8" and self.expert_format != "mxfp4":
            raise UnsupportedError(
                f"expert_activations mxfp8 needs experts in mxfp4, this model's are in {self.expert_format}",
                hint="use expert_activations auto",
            )
        return replace(self, expert_activations=chosen)

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence id."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def has_vision(self) -> bool:
        return self.vision is not None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Width of a routed expert's input and output."""
        return self.latent_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which the checkpoint stores fused into one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def a_log_shape(self) -> tuple[int, ...]:
        """Stored shape of `A_log`: the K3 files pad heads to a multiple of 128, the 48B files keep `[1, 1, H, 1]`."""
        if self.architecture == "kimi_linear":
            return (1, 1, self.kda_heads, 1)
        return (-(-self.kda_heads // 128) * 128,)

    @property
    def prefix(self) -> str:
        """What precedes `layers.N.` in a tensor's name."""
        return "language_model.model." if self.architecture == "kimi_k3" else "model."

    @property
    def lm_head_name(self) -> str:
        return "language_model.lm_head.weight" if self.architecture == "kimi_k3" else "lm_head.weight"

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense and layer % self.moe_layer_freq == 0

    @property
    def mla_layers(self) -> tuple[int, ...]:
        kda = frozenset(self.kda_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in kda)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))


def _parse(top: Fields, latent_norm_eps: float) -> ModelConfig:
    """Read a whole file. The top-level name decides: K3's nested text config calls itself kimi_linear."""
    architecture: Architecture
    if top.data.get("model_type") == "kimi_k3":
        architecture, text = "kimi_k3", top.child("text_config")
    elif top.data.get("model_type") == "kimi_linear":
        architecture, text = "kimi_linear", top
    else:
        raise top.fail("model_type", "'kimi_k3' or 'kimi_linear'")
    if not 0 < latent_norm_eps < 1:
        raise ConfigError(f"mla_latent_norm_eps is {latent_norm_eps}; expected a number between 0 and 1")
    _refuse_what_has_no_meaning(top, text)
    num_layers = text.integer("num_hidden_layers", high=1000)
    vocab_size = text.integer("vocab_size")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        num_layers=num_layers,
        intermediate_size=text.integer("intermediate_size"),
        rms_norm_eps=text.number("rms_norm_eps", low=0.0, high=1.0),
        latent_norm_eps=latent_norm_eps,
        initializer_range=text.number("initializer_range", low=0.0, default=0.02),
        max_position_embeddings=text.integer("max_position_embeddings", "model_max_length"),
        attn_res_block_size=text.optional_integer("attn_res_block_size"),
        expert_format=expert_format(top, text),
        vision=vision_config(top),
        **_activation(text),
        **_mla(text),
        **_experts(text, num_layers),
        **_kda(text, num_layers),
        **_special_ids(top, text, vocab_size),
    )
    _check_groups(config, text)
    return config


def _refuse_what_has_no_meaning(top: Fields, text: Fields) -> None:
    """Settings under which the published weights would compute something else."""
    for fields in (top, text):
        if fields.boolean("tie_word_embeddings", default=False):
            raise fields.fail("tie_word_embeddings", "false: the output head is a tensor of its own")
    text.require_absent("rope_scaling", "attention has no position encoding")
    if not text.boolean("mla_use_nope", default=text is top):
        raise text.fail("mla_use_nope", "true: the rope channels are never rotated")
    if text.boolean("attention_bias", default=False):
        raise text.fail("attention_bias", "false: no projection has a bias")
    if text.has("num_nextn_predict_layers"):
        text.integer("num_nextn_predict_layers", low=0, high=0)
    if text.has("num_key_value_heads") and text.value("num_key_value_heads") != text.value("num_attention_heads"):
        raise text.fail("num_key_value_heads", f"num_attention_heads, {text.value('num_attention_heads')}")


def _activation(text: Fields) -> dict[str, Any]:
    name = text.choice("hidden_act", among=("situ", "silu"))
    if name == "silu":
        return {"activation": name, "situ_beta": 0.0, "situ_linear_beta": 0.0}
    return {
        "activation": name,
        "situ_beta": text.number("activation_situ_beta", low=0.0),
        "situ_linear_beta": text.number("activation_situ_linear_beta", low=0.0),
    }


def _mla(text: Fields) -> dict[str, Any]:
    return {
        "num_heads": text.integer("num_attention_heads"),
        "q_lora_rank": text.optional_integer("q_lora_rank"),
        "kv_lora_rank": text.integer("kv_lora_rank"),
        "qk_nope_head_dim": text.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": text.integer("qk_rope_head_dim"),
        "v_head_dim": text.integer("v_head_dim"),
        "mla_output_gate": text.boolean("mla_use_output_gate", default=False),
    }


def _experts(text: Fields, num_layers: int) -> dict[str, Any]:
    text.choice("moe_router_activation_func", among=("sigmoid",), default="sigmoid")
    text.choice("topk_method", among=("noaux_tc",), default="noaux_tc")
    for keys in (("num_expert_group", "n_group"), ("topk_group",)):
        if text.has(*keys):
            text.integer(*keys, low=1, high=1)
    num_experts = text.integer("num_experts", "num_local_experts", high=1 << 16)
    latent = text.optional_integer("routed_expert_hidden_size")
    return {
        "num_experts": num_experts,
        "top_k": text.integer("num_experts_per_token", "num_experts_per_tok", high=num_experts),
        "num_shared_experts": text.integer("num_shared_experts", "n_shared_experts"),
        "moe_intermediate_size": text.integer("moe_intermediate_size"),
        "latent_size": latent,
        "latent_norm": latent is not None and text.boolean("latent_moe_use_norm", default=False),
        "renormalize": text.boolean("moe_renormalize", "norm_topk_prob", default=True),
        "routed_scaling_factor": text.number("routed_scaling_factor", low=0.0, default=1.0),
        **moe_layout(text, num_layers),
    }


def _kda(text: Fields, num_layers: int) -> dict[str, Any]:
    """KDA's sizes stand in `linear_attn_config`, or flat under transformers' own names."""
    nested = text.child("linear_attn_config") if text.has("linear_attn_config") else text
    flat = nested is text
    bound = nested.number("gate_lower_bound", high=0.0) if nested.has("gate_lower_bound") else None
    return {
        "kda_heads": nested.integer("linear_num_heads" if flat else "num_heads"),
        "kda_head_dim": nested.integer("linear_head_dim" if flat else "head_dim", low=32, high=256),
        "conv_width": nested.integer("linear_conv_kernel_dim" if flat else "short_conv_kernel_size", low=2, high=16),
        "full_rank_gate": nested.boolean("use_full_rank_gate", default=False),
        "gate_lower_bound": bound,
        "kda_layers": kda_layers(nested, text, num_layers),
    }


def _special_ids(top: Fields, text: Fields, vocab_size: int) -> dict[str, Any]:
    def single(key: str) -> int | None:
        fields = top if top.has(key) else text
        return fields.optional_integer(key, low=0, high=vocab_size - 1)

    holder = top if top.has("eos_token_id") else text
    if isinstance(holder.value("eos_token_id"), list):
        eos = holder.integers("eos_token_id", low=0, high=vocab_size - 1)
    else:
        one = single("eos_token_id")
        eos = () if one is None else (one,)
    return {"bos_token_id": single("bos_token_id"), "eos_token_ids": eos, "pad_token_id": single("pad_token_id")}


def _check_groups(config: ModelConfig, text: Fields) -> None:
    if config.expert_format != "mxfp4":
        return
    if config.moe_intermediate_size % MXFP4_GROUP:
        raise text.fail("moe_intermediate_size", f"a multiple of {MXFP4_GROUP}, the group of the mxfp4 weights")
    if config.expert_width % MXFP4_GROUP:
        key = "routed_expert_hidden_size" if config.latent_size else "hidden_size"
        raise text.fail(key, f"a multiple of {MXFP4_GROUP}, the group of the mxfp4 weights")
