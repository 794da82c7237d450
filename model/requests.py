"""Which operators a model needs, in which layers and shapes: the input of a dispatch plan."""

from __future__ import annotations

from k3hal.dispatch.call import DimValue
from k3hal.dispatch.plan import OpRequest
from k3hal.model.config import ModelConfig

PAGE_TOKENS = 128
EXPERTS = {"bf16": "moe_experts", "mxfp4": "moe_experts_mxfp4", "int4": "moe_experts_int4"}
"""The operator of routed experts by their weights' format, where activations are not rounded."""


def model_requests(
    cfg: ModelConfig, dtype: str, kv_dtype: str, tp: int = 1, *, drafts: bool = False, ranks: bool = False
) -> list[OpRequest]:
    """Every operator of one rank of `tp`, layers with the same static facts together. Needs no torch and no weights.

    With `drafts` also what a step takes that verifies them. With `ranks` as where the ranks' sums are added up, and not
    each rank looked at alone.
    """
    layers = tuple(range(cfg.num_layers))
    out = [
        OpRequest("embed", (), "any", {"dim": cfg.hidden_size}),
        OpRequest("rms_norm", (), "any", {"dim": cfg.hidden_size}),
        OpRequest("linear", (), "any", {"dim": cfg.hidden_size}),
        OpRequest("linear_fp32", (), "any", {"dim": cfg.hidden_size}),
    ]
    if cfg.attn_res_block_size:
        dims: dict[str, DimValue] = {"dim": cfg.hidden_size, "block_size": cfg.attn_res_block_size}
        out.append(OpRequest("attn_res_mix", (), "any", dims))
    out += _attention(cfg, layers, kv_dtype, tp, drafts)
    out.append(OpRequest(f"{cfg.activation}_and_mul", layers, "any", {"dim": cfg.hidden_size}))
    out += _experts(cfg, tuple(i for i in layers if cfg.is_moe(i)), tp, ranks)
    out += [
        OpRequest("step_metadata", (), "any", {"page_tokens": PAGE_TOKENS}),
        OpRequest("copy_pages", ()),
        OpRequest("sample", ()),
    ]
    return out


def _attention(cfg: ModelConfig, layers: tuple[int, ...], kv_dtype: str, tp: int, drafts: bool) -> list[OpRequest]:
    kda, mla = (tuple(i for i in layers if cfg.is_kda(i) is want) for want in (True, False))
    kda_dims: dict[str, DimValue] = {"heads": cfg.kda_heads // tp, "head_dim": cfg.kda_head_dim}
    kda_dims |= {"conv_width": cfg.conv_width, "bounded": cfg.gate_lower_bound is not None}
    mla_dims: dict[str, DimValue] = {"heads": cfg.num_heads // tp, "kv_lora": cfg.kv_lora_rank}
    mla_dims |= {"rope_dim": cfg.qk_rope_head_dim, "nope_dim": cfg.qk_nope_head_dim, "v_dim": cfg.v_head_dim}
    mla_dims |= {"kv_dtype": kv_dtype, "page_tokens": PAGE_TOKENS}
    out = []
    if kda:
        out += [OpRequest("kda_prefill", kda, "prefill", kda_dims), OpRequest("kda_decode", kda, "decode", kda_dims)]
    if kda and drafts:
        out += [OpRequest(op, kda, "verify", kda_dims) for op in ("kda_verify", "kda_commit")]
    if mla:
        out.append(OpRequest("mla_cache_insert", mla, "any", mla_dims))
        out.append(OpRequest("head_linear", mla, "decode", {"heads": cfg.num_heads // tp}))
        out += [OpRequest("mla_prefill", mla, "prefill", mla_dims), OpRequest("mla_decode", mla, "decode", mla_dims)]
        if cfg.mla_output_gate:
            out.append(OpRequest("sigmoid_gate", mla, "any", {"dim": cfg.num_heads // tp * cfg.v_head_dim}))
    return out


def experts_op(cfg: ModelConfig, *, ranks: bool) -> str:
    """The operator of the routed experts.

    With a latent space the coarse one, unless `ranks` have to meet inside it or activations are to be rounded, which it
    never does.
    """
    if cfg.expert_activations == "mxfp8":
        return "moe_experts_a8w4"
    if cfg.latent_size is not None and not ranks:
        return "latent_moe"
    return EXPERTS[cfg.expert_format]


def _experts(cfg: ModelConfig, layers: tuple[int, ...], tp: int, ranks: bool) -> list[OpRequest]:
    if not layers:
        return []
    dims: dict[str, DimValue] = {"experts": cfg.num_experts, "top_k": cfg.top_k, "activation": cfg.activation}
    dims |= {"hidden": cfg.latent_size or cfg.hidden_size, "intermediate": cfg.moe_intermediate_size // tp}
    op = experts_op(cfg, ranks=ranks)
    if op == "latent_moe":
        assert cfg.latent_size is not None
        dims |= {"hidden": cfg.hidden_size, "latent": cfg.latent_size, "expert_format": cfg.expert_format}
    return [OpRequest("moe_route", layers, "any", dims), OpRequest(op, layers, "any", dims)]
