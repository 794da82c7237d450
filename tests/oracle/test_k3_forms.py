"""The K3-only parts of the oracle, recomputed from its own taps or by equivalences that must hold."""

from typing import Any

import pytest
import torch

from .k3_naive import dequantize_mxfp4, naive_logits, rms_norm, situ
from .synthetic import k3_config, random_tensors

CONFIG = k3_config()
TENSORS = random_tensors(CONFIG, seed=1)
TEXT: dict[str, Any] = CONFIG["text_config"]
IDS = torch.randint(0, 90, (24,), generator=torch.Generator().manual_seed(4)).tolist()
LAYERS = "language_model.model.layers"


@pytest.fixture(scope="module")
def taps() -> dict[str, torch.Tensor]:
    taps: dict[str, torch.Tensor] = {}
    naive_logits(CONFIG, TENSORS, IDS, taps=taps)
    return taps


def _weight(name: str) -> torch.Tensor:
    packed = TENSORS.get(f"{name}.weight_packed")
    if packed is not None:
        return dequantize_mxfp4(packed, TENSORS[f"{name}.weight_scale"])
    return TENSORS[f"{name}.weight"].double()


def _mix(sources: list[torch.Tensor], name: str) -> torch.Tensor:
    query = _weight(f"{name}_norm") * _weight(f"{name}_proj")[0]
    scores = [(s / (s.square().mean(-1, keepdim=True) + 1e-5).sqrt()) @ query for s in sources]
    shares = torch.stack(scores, -1).softmax(-1)
    return sum((shares[:, j, None] * s for j, s in enumerate(sources)), torch.zeros_like(sources[0]))


def _sources(taps: dict[str, torch.Tensor], layer: int, before_mlp: bool) -> list[torch.Tensor]:
    """The finished blocks and the running sum, added up by block from the outputs of all earlier sublayers."""
    size = TEXT["attn_res_block_size"]
    added = [(i, taps[f"layers.{i}.{part}_out"]) for i in range(layer) for part in ("attn", "mlp")]
    if before_mlp:
        added.append((layer, taps[f"layers.{layer}.attn_out"]))
    sources = [_weight("language_model.model.embed_tokens")[torch.tensor(IDS)]]
    for block in range(TEXT["num_hidden_layers"] // size):
        members = [value for i, value in added if i // size == block]
        if members:
            sources.append(torch.stack(members).sum(0))
    return sources


@pytest.mark.parametrize("layer", range(TEXT["num_hidden_layers"]))
def test_attention_residual_sources(taps: dict[str, torch.Tensor], layer: int) -> None:
    size = TEXT["attn_res_block_size"]
    for kind, norm, before_mlp, count in (
        ("attn_in", "input_layernorm", False, -(-layer // size) + 1),
        ("mlp_in", "post_attention_layernorm", True, layer // size + 2),
    ):
        name = f"{LAYERS}.{layer}.{'mlp_res' if before_mlp else 'self_attention_res'}"
        sources = _sources(taps, layer, before_mlp)
        assert len(sources) == count
        expected = rms_norm(_mix(sources, name), _weight(f"{LAYERS}.{layer}.{norm}"), 1e-5)
        torch.testing.assert_close(taps[f"layers.{layer}.{kind}"], expected, rtol=1e-10, atol=1e-10)


def test_output_mix_precedes_the_final_norm(taps: dict[str, torch.Tensor]) -> None:
    mixed = _mix(_sources(taps, TEXT["num_hidden_layers"], False), "language_model.model.output_attn_res")
    hidden = rms_norm(mixed, _weight("language_model.model.norm"), 1e-5)
    expected = hidden @ _weight("language_model.lm_head").T
    torch.testing.assert_close(naive_logits(CONFIG, TENSORS, IDS).logits, expected, rtol=1e-10, atol=1e-10)


def test_latent_experts_token_by_token(taps: dict[str, torch.Tensor]) -> None:
    layer, moe = 3, f"{LAYERS}.3.block_sparse_moe"
    gaps = naive_logits(CONFIG, TENSORS, IDS).router_gaps[layer]
    for t, x in enumerate(taps[f"layers.{layer}.mlp_in"]):
        scores = torch.sigmoid(_weight(f"{moe}.gate") @ x)
        biased = (scores + TENSORS[f"{moe}.gate.e_score_correction_bias"].double()).tolist()
        order = sorted(range(len(biased)), key=lambda e: -biased[e])
        assert gaps[t].item() == pytest.approx(biased[order[2]] - biased[order[3]], abs=1e-12)
        z = _weight(f"{moe}.routed_expert_down_proj") @ x
        y = torch.zeros_like(z)
        for e in order[:3]:
            gate, up = _weight(f"{moe}.experts.{e}.w1") @ z, _weight(f"{moe}.experts.{e}.w3") @ z
            share = scores[e] / scores[order[:3]].sum()
            y += share * (_weight(f"{moe}.experts.{e}.w2") @ situ(gate, up, 4.0, 25.0))
        y = _weight(f"{moe}.routed_expert_up_proj") @ rms_norm(y, _weight(f"{moe}.routed_expert_norm"), 1e-5)
        shared = situ(
            _weight(f"{moe}.shared_experts.gate_proj") @ x, _weight(f"{moe}.shared_experts.up_proj") @ x, 4, 25
        )
        y += _weight(f"{moe}.shared_experts.down_proj") @ shared
        torch.testing.assert_close(taps[f"layers.{layer}.mlp_out"][t], y, rtol=1e-9, atol=1e-10)


def test_forced_routing_takes_the_given_experts_and_reports_how_wrong_they_are(taps: dict[str, torch.Tensor]) -> None:
    layer, moe = 3, f"{LAYERS}.3.block_sparse_moe"
    scores = torch.sigmoid(taps[f"layers.{layer}.mlp_in"] @ _weight(f"{moe}.gate").T)
    biased = scores + TENSORS[f"{moe}.gate.e_score_correction_bias"].double()
    order = biased.argsort(-1, descending=True)
    free = naive_logits(CONFIG, TENSORS, IDS)
    same = naive_logits(CONFIG, TENSORS, IDS, routing={layer: order[:, [2, 0, 1]].int()})
    torch.testing.assert_close(same.logits, free.logits, rtol=1e-11, atol=1e-11)
    assert torch.equal(same.router_gaps[layer], free.router_gaps[layer])
    swapped = naive_logits(CONFIG, TENSORS, IDS, routing={layer: order[:, [0, 1, 3]]})
    assert (swapped.logits - free.logits).abs().max() > 1e-2
    assert torch.equal(swapped.router_gaps[layer], -free.router_gaps[layer])


def test_gated_latent_attention_in_absorbed_form(taps: dict[str, torch.Tensor]) -> None:
    layer, mla = 4, f"{LAYERS}.4.self_attn"
    heads, nope, rope, width = 2, 32, 16, 32
    x = taps[f"layers.{layer}.attn_in"]
    q = rms_norm(x @ _weight(f"{mla}.q_a_proj").T, _weight(f"{mla}.q_a_layernorm"), 1e-6) @ _weight(f"{mla}.q_b_proj").T
    kv = x @ _weight(f"{mla}.kv_a_proj_with_mqa").T
    c, k_pe = rms_norm(kv[:, :-rope], _weight(f"{mla}.kv_a_layernorm"), 1e-6), kv[:, -rope:]
    up = _weight(f"{mla}.kv_b_proj").view(heads, nope + width, -1)
    gate = torch.sigmoid(x @ _weight(f"{mla}.g_proj").T).view(-1, heads, width)
    for t in range(len(IDS)):
        out = []
        for h, query in enumerate(q[t].view(heads, nope + rope)):
            scores = c[: t + 1] @ (query[:nope] @ up[h, :nope]) + k_pe[: t + 1] @ query[nope:]
            latent = (scores / 48**0.5).softmax(0) @ c[: t + 1]
            out.append(up[h, nope:] @ latent * gate[t, h])
        expected = _weight(f"{mla}.o_proj") @ torch.cat(out)
        torch.testing.assert_close(taps[f"layers.{layer}.attn_out"][t], expected, rtol=1e-9, atol=1e-11)


def test_packed_experts_equal_their_dequantised_matrices() -> None:
    plain = {name: value for name, value in TENSORS.items() if ".weight_" not in name}
    for name in TENSORS:
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            plain[stem] = dequantize_mxfp4(TENSORS[name], TENSORS[f"{stem}_scale"]).bfloat16()
    assert torch.equal(naive_logits(CONFIG, plain, IDS).logits, naive_logits(CONFIG, TENSORS, IDS).logits)


def test_only_the_first_heads_of_a_log_are_read_and_all_of_them_matter() -> None:
    name = f"{LAYERS}.0.self_attn.A_log"
    assert TENSORS[name].shape == (128,)
    expected = naive_logits(CONFIG, TENSORS, IDS).logits
    padding, used = TENSORS[name].clone(), TENSORS[name].clone()
    padding[4:] = 3.0
    used[3] += 1.0
    assert torch.equal(naive_logits(CONFIG, TENSORS | {name: padding}, IDS).logits, expected)
    assert (naive_logits(CONFIG, TENSORS | {name: used}, IDS).logits - expected).abs().max() > 1e-4


def test_the_past_does_not_see_the_future() -> None:
    whole = naive_logits(CONFIG, TENSORS, IDS)
    part = naive_logits(CONFIG, TENSORS, IDS[:9])
    torch.testing.assert_close(part.logits, whole.logits[:9], rtol=1e-11, atol=1e-11)
    assert torch.isinf(whole.router_gaps[0]).all()
    assert torch.isfinite(whole.router_gaps[1:]).all()


class _Recorder(dict[str, torch.Tensor]):
    """A dict that notes the names asked for with []."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return super().__getitem__(name)


def test_every_tensor_is_read() -> None:
    recorder = _Recorder(TENSORS)
    naive_logits(CONFIG, recorder, IDS * 4)
    assert recorder.read == TENSORS.keys()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("num_expert_group", 2),
        ("moe_router_activation_func", "softmax"),
        ("hidden_act", "gelu"),
    ],
)
def test_forms_without_a_formula_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}.*{value}"):
        naive_logits(CONFIG | {"text_config": TEXT | {key: value}}, TENSORS, IDS)
