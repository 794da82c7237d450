"""Kimi K3 and Kimi-Linear logits in fp64, one formula after the other: the oracle the engine is compared with.

Deliberately naive and independent: nothing of the repo is imported, no weight is fused, no state is cached, the delta
rule runs token by token. Names in the code are those of the published checkpoint. Vectors are rows: `[T, width]`.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
L2_EPS = 1e-6
INFINITE_GAP = float("inf")


@dataclass(frozen=True)
class OracleResult:
    """What one forward pass gives.

    logits: `[T, vocab]` fp64, row t predicts token t+1.
    router_gaps: `[layers, T]` fp64, lowest biased score of a chosen expert minus the highest of one not chosen;
        infinite in dense layers. A small gap means that a rounding error may choose another expert. Negative only
        where `routing` forced another choice than the scores': by how much that choice was wrong.
    """

    logits: Tensor
    router_gaps: Tensor


@dataclass(frozen=True)
class _Model:
    """A config, the raw tensors by name, and where to put intermediate values."""

    text: Mapping[str, Any]
    root: str
    tensors: Mapping[str, Tensor]
    latent_norm_eps: float
    routing: Mapping[int, Tensor]
    taps: MutableMapping[str, Tensor] | None
    gaps: dict[int, Tensor] = field(default_factory=dict)

    def vector(self, name: str) -> Tensor:
        return self.tensors[f"{self.root}{name}"].to(F64)

    def matrix(self, name: str) -> Tensor:
        """The fp64 `[out, in]` matrix called `name`, dequantised if it is stored packed."""
        stem = f"{self.root}{name}.weight"
        if f"{stem}_packed" in self.tensors:
            return dequantize_mxfp4(self.tensors[f"{stem}_packed"], self.tensors[f"{stem}_scale"])
        return self.vector(f"{name}.weight")

    def apply(self, name: str, x: Tensor) -> Tensor:
        return x @ self.matrix(name).T

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, self.vector(f"{name}.weight"), self.text["rms_norm_eps"] if eps is None else eps)

    def tap(self, name: str, value: Tensor) -> None:
        if self.taps is not None:
            self.taps[name] = value.clone()


def naive_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    token_ids: list[int],
    *,
    latent_norm_eps: float = 1e-6,
    routing: Mapping[int, Tensor] | None = None,
    taps: MutableMapping[str, Tensor] | None = None,
) -> OracleResult:
    """Run one sequence through the model.

    config: the content of config.json, K3 (nested) or Kimi-Linear (flat). tensors: the checkpoint's, by published name.
    latent_norm_eps: epsilon of q_a_layernorm and kv_a_layernorm. routing: by layer, expert ids `[T, k]` to take
    instead of the best k. taps: if given, receives `layers.{i}.attn_in`, `.attn_out`, `.mlp_in`, `.mlp_out` and
    `.prefix` (the residual stream after layer i), each `[T, hidden]`.
    Raises ValueError for a model outside the formulas, KeyError for a missing tensor or config key.
    """
    nested = "text_config" in config
    text = config["text_config"] if nested else config
    _refuse_unknown_forms(text)
    model = _Model(text, "language_model." if nested else "", tensors, latent_norm_eps, routing or {}, taps)
    x = model.vector("model.embed_tokens.weight")[torch.tensor(token_ids)]
    x = _attn_res_stack(model, x) if text.get("attn_res_block_size") else _plain_stack(model, x)
    logits = model.apply("lm_head", model.norm("model.norm", x))
    dense = torch.full((len(token_ids),), INFINITE_GAP, dtype=F64)
    gaps = torch.stack([model.gaps.get(layer, dense) for layer in range(text["num_hidden_layers"])])
    return OracleResult(logits, gaps)


def _refuse_unknown_forms(text: Mapping[str, Any]) -> None:
    expected = {
        "mla_use_nope": True,
        "num_expert_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
    }
    for key, value in expected.items():
        if text.get(key, value) != value:
            raise ValueError(f"the oracle knows {key} = {value!r} only, the config says {text[key]!r}")


# ---------------------------------------------------------------- depth


def _plain_stack(model: _Model, x: Tensor) -> Tensor:
    """Pre-norm residual layers."""
    for layer in range(model.text["num_hidden_layers"]):
        x = x + _attention(model, layer, x)
        x = x + _feed_forward(model, layer, x)
        model.tap(f"layers.{layer}.prefix", x)
    return x


def _attn_res_stack(model: _Model, x: Tensor) -> Tensor:
    """Attention Residuals: every sublayer reads a mix of the finished blocks and the running sum of the present one."""
    prefix, blocks = x, []
    for layer in range(model.text["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        starts_block = layer % model.text["attn_res_block_size"] == 0
        mixed = _mix(model, [*blocks, prefix], f"{name}.self_attention_res")
        if starts_block:
            blocks.append(prefix)
        attended = _attention(model, layer, mixed)
        prefix = attended if starts_block else prefix + attended
        mixed = _mix(model, [*blocks, prefix], f"{name}.mlp_res")
        prefix = prefix + _feed_forward(model, layer, mixed)
        model.tap(f"layers.{layer}.prefix", prefix)
    return _mix(model, [*blocks, prefix], "model.output_attn_res")


def _mix(model: _Model, sources: list[Tensor], name: str) -> Tensor:
    proj = model.vector(f"{name}_proj.weight")[0]
    return attn_res_mix(sources, model.vector(f"{name}_norm.weight"), proj, model.text["rms_norm_eps"])


def attn_res_mix(sources: list[Tensor], norm_weight: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Softmax-weighted sum over n sources `[T, hidden]`; keys are normed, values are raw."""
    values = torch.stack(sources)
    scores = rms_norm(values, norm_weight, eps) @ proj
    return (torch.softmax(scores, dim=0)[..., None] * values).sum(0)


# ---------------------------------------------------------------- attention


def _attention(model: _Model, layer: int, x: Tensor) -> Tensor:
    name = f"model.layers.{layer}"
    x = model.norm(f"{name}.input_layernorm", x)
    model.tap(f"layers.{layer}.attn_in", x)
    is_kda = layer + 1 in model.text["linear_attn_config"]["kda_layers"]
    out = (_kda if is_kda else _mla)(model, f"{name}.self_attn", x)
    model.tap(f"layers.{layer}.attn_out", out)
    return out


def _kda(model: _Model, name: str, x: Tensor) -> Tensor:
    linear = model.text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]

    def conved(part: str) -> Tensor:
        weight = model.vector(f"{name}.{part}_conv1d.weight")[:, 0]
        return causal_conv(model.apply(f"{name}.{part}_proj", x), weight).view(-1, heads, dim)

    q, k, v = (conved(part) for part in ("q", "k", "v"))
    beta = torch.sigmoid(model.apply(f"{name}.b_proj", x))
    decay = model.apply(f"{name}.f_b_proj", model.apply(f"{name}.f_a_proj", x)) + model.vector(f"{name}.dt_bias")
    a_log = model.vector(f"{name}.A_log").flatten()[:heads]
    g = kda_log_decay(decay.view(-1, heads, dim), a_log, linear.get("gate_lower_bound"))
    out = kda_recurrence(l2_norm(q), l2_norm(k), v, g, beta)
    if linear.get("use_full_rank_gate"):
        gate = model.apply(f"{name}.g_proj", x)
    else:
        gate = model.apply(f"{name}.g_b_proj", model.apply(f"{name}.g_a_proj", x))
    out = model.norm(f"{name}.o_norm", out) * torch.sigmoid(gate.view(-1, heads, dim))
    return model.apply(f"{name}.o_proj", out.flatten(1))


def _mla(model: _Model, name: str, x: Tensor) -> Tensor:
    text = model.text
    heads, nope, rope = text["num_attention_heads"], text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    latent = text["kv_lora_rank"]
    if text.get("q_lora_rank"):
        q_latent = model.norm(f"{name}.q_a_layernorm", model.apply(f"{name}.q_a_proj", x), model.latent_norm_eps)
        q = model.apply(f"{name}.q_b_proj", q_latent)
    else:
        q = model.apply(f"{name}.q_proj", x)
    q = q.view(-1, heads, nope + rope).transpose(0, 1)
    kv = model.apply(f"{name}.kv_a_proj_with_mqa", x)
    c = model.norm(f"{name}.kv_a_layernorm", kv[:, :latent], model.latent_norm_eps)
    k_pe = kv[:, latent:]
    kv = model.apply(f"{name}.kv_b_proj", c).view(-1, heads, nope + text["v_head_dim"]).transpose(0, 1)
    k_nope, v = kv[..., :nope], kv[..., nope:]
    scores = q[..., :nope] @ k_nope.transpose(1, 2) + q[..., nope:] @ k_pe.T
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = torch.softmax((scores * (nope + rope) ** -0.5).masked_fill(future, -torch.inf), dim=-1)
    out = (weights @ v).transpose(0, 1).flatten(1)
    if text.get("mla_use_output_gate"):
        out = out * torch.sigmoid(model.apply(f"{name}.g_proj", x))
    return model.apply(f"{name}.o_proj", out)


# ---------------------------------------------------------------- feed-forward


def _feed_forward(model: _Model, layer: int, x: Tensor) -> Tensor:
    name = f"model.layers.{layer}"
    x = model.norm(f"{name}.post_attention_layernorm", x)
    model.tap(f"layers.{layer}.mlp_in", x)
    if layer < model.text["first_k_dense_replace"]:
        out = _mlp(model, f"{name}.mlp", x)
    else:
        out = _moe(model, layer, f"{name}.block_sparse_moe", x)
    model.tap(f"layers.{layer}.mlp_out", out)
    return out


def _activate(model: _Model, gate: Tensor, up: Tensor) -> Tensor:
    act = model.text["hidden_act"]
    if act == "silu":
        return gate * torch.sigmoid(gate) * up
    if act == "situ":
        return situ(gate, up, model.text["activation_situ_beta"], model.text["activation_situ_linear_beta"])
    raise ValueError(f"the oracle knows hidden_act silu and situ only, the config says {act!r}")


def _mlp(model: _Model, name: str, x: Tensor) -> Tensor:
    hidden = _activate(model, model.apply(f"{name}.gate_proj", x), model.apply(f"{name}.up_proj", x))
    return model.apply(f"{name}.down_proj", hidden)


def _moe(model: _Model, layer: int, name: str, x: Tensor) -> Tensor:
    scores = torch.sigmoid(model.apply(f"{name}.gate", x))
    biased = scores + model.vector(f"{name}.gate.e_score_correction_bias")
    best = biased.topk(model.text["num_experts_per_token"]).indices
    chosen = model.routing.get(layer, best).long()
    model.gaps[layer] = _router_gap(biased, chosen)
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * model.text["routed_scaling_factor"]
    is_latent = bool(model.text.get("routed_expert_hidden_size"))
    z = model.apply(f"{name}.routed_expert_down_proj", x) if is_latent else x
    routed = torch.zeros_like(z)
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        inner = _activate(
            model,
            model.apply(f"{name}.experts.{expert}.w1", z[token]),
            model.apply(f"{name}.experts.{expert}.w3", z[token]),
        )
        routed[token] += weights[token, slot, None] * model.apply(f"{name}.experts.{expert}.w2", inner)
    if is_latent:
        if model.text.get("latent_moe_use_norm"):
            routed = model.norm(f"{name}.routed_expert_norm", routed)
        routed = model.apply(f"{name}.routed_expert_up_proj", routed)
    return routed + _mlp(model, f"{name}.shared_experts", x)


def _router_gap(biased: Tensor, chosen: Tensor) -> Tensor:
    """Lowest score of a chosen expert minus the highest of one not chosen, `[T]`."""
    is_chosen = torch.zeros_like(biased, dtype=torch.bool).scatter(1, chosen, True)
    lowest = biased.masked_fill(~is_chosen, torch.inf).amin(-1)
    return lowest - biased.masked_fill(is_chosen, -torch.inf).amax(-1)


# ---------------------------------------------------------------- formulas


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def l2_norm(x: Tensor) -> Tensor:
    """Unit length over the last dimension; the epsilon is on the sum of squares."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Capped SiLU of `gate` times capped `up`; the sigmoid sees the uncapped gate."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution and SiLU: x `[T, C]`, weight `[C, W]`, the last tap on the current token."""
    width = weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    y = sum((padded[j : j + len(x)] * weight[:, j] for j in range(width)), torch.zeros_like(x))
    return y * torch.sigmoid(y)


def kda_log_decay(decay: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """Natural log of the decay per key channel: decay `[T, H, K]` (bias added), a_log `[H]`, result <= 0."""
    rate = torch.exp(a_log)[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * decay)
    return -rate * torch.logaddexp(decay, torch.zeros_like(decay))


def kda_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule, one token after the other: q, k, g `[T, H, K]`, v `[T, H, V]`, beta `[T, H]` -> `[T, H, V]`.

    q and k have unit length. The state `[H, K, V]` starts at zero.
    """
    length, heads, dim = k.shape
    state = k.new_zeros(heads, dim, v.shape[2])
    out = torch.empty_like(v)
    for t in range(length):
        state = torch.exp(g[t])[..., None] * state
        read = (state * k[t][..., None]).sum(1)
        update = beta[t][:, None] * (v[t] - read)
        state = state + k[t][..., None] * update[:, None, :]
        out[t] = (state * q[t][..., None]).sum(1) * dim**-0.5
    return out


def dequantize_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """U8 `[out, in/2]` codes (low nibble first) and U8 `[out, in/32]` exponents (bias 127) -> fp64 `[out, in]`."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1).long()
    magnitudes = torch.tensor(E2M1, dtype=F64)[codes & 7]
    signed = torch.where(codes >= 8, -magnitudes, magnitudes)
    return signed * torch.exp2(scale.to(F64) - 127).repeat_interleave(32, dim=1)
