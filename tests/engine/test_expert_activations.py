"""`expert_activations`: models whose routed experts round what they multiply, and models that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3hal.checkpoints import generated_model, open_model
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize
from k3hal.dispatch.plan import make_plan
from k3hal.dispatch.plan_file import save_plan
from k3hal.dispatch.probe import probe
from k3hal.engine.build import estimate_memory
from k3hal.engine.options import EngineOptions
from k3hal.errors import PlanError, UnsupportedError, UsageError
from k3hal.llm import LLM
from k3hal.model.config import ModelConfig
from k3hal.model.context import Build
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.moe import MoE
from k3hal.model.parallel import ParallelPlan
from k3hal.model.presets import preset_config
from k3hal.model.requests import experts_op, model_requests
from k3hal.sampling_params import SamplingParams

CPU = torch.device("cpu")
TOKENS = [(7 * i) % 300 for i in range(90)]
NANO = replace(ModelConfig.from_json(preset_config("nano")), num_layers=2, kda_layers=(0, 1))
BF16 = ModelConfig.from_json(preset_config("kl-tiny"))
REFUSAL = "expert_activations mxfp8 needs experts in mxfp4, this model's are in bf16"


@pytest.fixture(scope="module")
def rounding(nano_dir: Path) -> Iterator[LLM]:
    """As the fixture `llm`, with activations rounded."""
    options = {"max_model_len": 512, "max_num_seqs": 8, "expert_activations": "mxfp8"}
    with LLM(nano_dir, device="cpu", dtype="float32", **options) as model:
        yield model


def experts(llm: LLM) -> list[str]:
    return [entry.request.op for entry in llm.plan.entries if entry.request.op in ("latent_moe", "moe_experts_a8w4")]


def test_a_model_that_rounds_is_near_the_one_that_does_not(llm: LLM, rounding: LLM) -> None:
    assert (experts(llm), experts(rounding)) == (["latent_moe"], ["moe_experts_a8w4"])
    plain, rounded = llm.logits(TOKENS), rounding.logits(TOKENS)
    off = (rounded - plain).norm() / plain.norm()
    # A factor of E4M3 is off by 2^-4 at most and by far less on average; the experts are a part of the stream.
    assert 1e-3 < off < 2.0**-4, off


def test_a_model_that_rounds_generates_what_its_logits_say(rounding: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answer = rounding.generate([TOKENS], params)[0].outputs[0].token_ids
    logits = rounding.logits(TOKENS + answer)[len(TOKENS) - 1 : -1]
    assert len(answer) == 6 and logits.argmax(-1).tolist() == answer


def moe(cfg: ModelConfig) -> tuple[MoE, GeneratedModel]:
    """Layer 1 by itself, of a generated model."""
    plan = make_plan(
        model_requests(cfg, "float32", "float32"), build_selector(), model="m", device=probe("cpu"), dtype="float32"
    )
    source = GeneratedModel.of("m", cfg)
    reader = GeneratedReader(source, CPU, torch.float32)
    return MoE(Build(cfg, plan.bind(), reader, CPU, torch.float32, ParallelPlan()), 1), source


def by_hand(source: GeneratedModel, x: Tensor) -> Tensor:
    """What layer 1 makes of x [T, D], token by token and expert by expert."""
    cfg, reader = source.config, GeneratedReader(source, CPU, torch.float32)

    def weight(name: str) -> Tensor:
        return reader.get(f"{cfg.prefix}layers.1.block_sparse_moe.{name}")

    def matrix(expert: int, part: str) -> Tensor:
        name = f"experts.{expert}.{part}.weight"
        return mx_dequantize(weight(f"{name}_packed"), weight(f"{name}_scale"), torch.float32)

    def situ(gate: Tensor, up: Tensor) -> Tensor:
        beta, cap = cfg.situ_beta, cfg.situ_linear_beta
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * cap * torch.tanh(up / cap)

    scores = torch.sigmoid(x @ weight("gate.weight").float().T)
    chosen = (scores + weight("gate.e_score_correction_bias")).topk(cfg.top_k).indices
    shares = scores.gather(1, chosen)
    shares = shares / shares.sum(-1, keepdim=True) * cfg.routed_scaling_factor
    latent = x @ weight("routed_expert_down_proj.weight").T
    total = torch.zeros_like(latent)
    matrices = {e: [matrix(e, part) for part in ("w1", "w3", "w2")] for e in sorted(set(chosen.flatten().tolist()))}
    for token, choices in enumerate(chosen.tolist()):
        z = mxfp8_rounded(latent[token])
        for share, expert in zip(shares[token], choices, strict=True):
            gate, up, down = matrices[expert]
            total[token] += share * (down @ mxfp8_rounded(situ(gate @ z, up @ z)))
    norm = weight("routed_expert_norm.weight")
    total = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + cfg.rms_norm_eps) * norm
    gate, up, down = (weight(f"shared_experts.{part}_proj.weight") for part in ("gate", "up", "down"))
    return total @ weight("routed_expert_up_proj.weight").T + situ(x @ gate.T, x @ up.T) @ down.T


def test_a_layer_is_its_parts_composed_by_hand() -> None:
    x = torch.randn(5, NANO.hidden_size, generator=torch.Generator().manual_seed(0))
    layer, source = moe(NANO.with_expert_activations("mxfp8"))
    with torch.inference_mode():
        found, plain, wanted = layer(x), moe(NANO)[0](x), by_hand(source, x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert (plain - wanted).abs().max() > 1e-3, "without rounding it is another layer"


@pytest.mark.parametrize("ranks", [False, True])
def test_the_choice_is_the_loaders_and_names_the_operator(ranks: bool) -> None:
    assert NANO.expert_activations == "auto" and experts_op(NANO, ranks=ranks) != "moe_experts_a8w4"
    chosen = NANO.with_expert_activations("mxfp8")
    assert experts_op(chosen, ranks=ranks) == "moe_experts_a8w4"
    assert chosen.with_expert_activations("auto") == NANO


def test_a_generated_model_takes_the_choice_too() -> None:
    source = generated_model("random:nano")
    assert source is not None
    assert open_model(source, expert_activations="mxfp8").config.expert_activations == "mxfp8"


def test_experts_that_are_not_mxfp4_are_refused() -> None:
    source, options = GeneratedModel.of("kl-tiny", BF16), EngineOptions(device="cpu", expert_activations="mxfp8")
    for refused in (
        lambda: BF16.with_expert_activations("mxfp8"),
        lambda: LLM("random:kl-tiny", device="cpu", expert_activations="mxfp8"),
        lambda: estimate_memory(source, options),
    ):
        with pytest.raises(UnsupportedError, match=REFUSAL) as caught:
            refused()
        assert "\n" not in str(caught.value) and "use expert_activations auto" in str(caught.value)
    assert BF16.with_expert_activations("auto") == BF16


def test_a_plan_of_the_other_choice_is_refused(llm: LLM, nano_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save_plan(llm.plan, file)
    with pytest.raises(PlanError, match="no entry for moe_experts_a8w4"):
        LLM(nano_dir, device="cpu", dtype="float32", plan=file, expert_activations="mxfp8")


@pytest.mark.parametrize("word", ["fp8", "", True])
def test_a_word_that_is_no_choice_is_one_line(word: object) -> None:
    with pytest.raises(UsageError, match=r"^expert_activations is .* \(it is one of auto, mxfp8\)$"):
        EngineOptions.of(expert_activations=word)
