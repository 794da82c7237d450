"""Memory from the manifest: it agrees with the manifest, with the engine's cache, and with itself between layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.config import ModelConfig
from k3hal.model.manifest import expected_tensors
from k3hal.model.presets import PRESETS, preset_config
from k3hal.plan.cache import cache_cost
from k3hal.plan.layout import Layout, layout_of
from k3hal.plan.weights import ModelWeights, model_config, pipeline_stages

from .conftest import Answer

Plan = Callable[[str], Answer]
ONE = Layout("tp", 1, 1, 1)


@pytest.mark.parametrize("preset", ["full", *PRESETS])
def test_all_bytes_of_the_manifest_are_counted(preset: str) -> None:
    config = model_config(None) if preset == "full" else ModelConfig.from_json(preset_config(preset))
    weights = ModelWeights(config)
    total = sum(spec.nbytes for spec in expected_tensors(config))
    assert weights.total == weights.per_gpu(ONE, vision_split=False) == sum(weights.by_kind.values()) == total


def test_full_size() -> None:
    weights = ModelWeights(model_config(None))
    assert weights.total == 1_560_860_324_864
    # 896 experts of 17,547,264 bytes in 92 layers.
    assert weights.by_kind["experts"] == 896 * 92 * 17_547_264
    # A finer scale costs what its bits say: half a byte and a scale a group of 16.
    assert ModelWeights(model_config(None), 4.5).by_kind["experts"] == weights.by_kind["experts"] * 4.5 / 4.25


@pytest.mark.parametrize("kind", ["tp", "tep", "tp_pp", "tp_dp", "dep"])
def test_layouts_hold_the_model_together(kind: str) -> None:
    """All accelerators together hold at least the model; more accelerators never hold more each."""
    weights = ModelWeights(model_config(None))
    each = [weights.per_gpu(layout_of(kind, nodes, 8), vision_split=False) for nodes in (1, 2, 4)]
    assert sorted(each, reverse=True) == each
    for nodes, size in zip((1, 2, 4), each, strict=True):
        assert size * nodes * 8 >= weights.total


def test_data_parallel_ranks_hold_what_is_not_experts_each() -> None:
    weights = ModelWeights(model_config(None))
    tp, dep = (weights.per_gpu(layout_of(kind, 2, 8), vision_split=False) for kind in ("tep", "dep"))
    dense = weights.total - weights.by_kind["experts"]
    assert dep == weights.by_kind["experts"] / 16 + dense
    assert tp < dep


@pytest.mark.parametrize(("layers", "stages"), [(93, 1), (93, 2), (93, 4), (7, 7)])
def test_pipeline_stages_cover_every_layer_once(layers: int, stages: int) -> None:
    parts = pipeline_stages(layers, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_cache_costs_what_the_engine_s_cache_does() -> None:
    config = model_config(None)
    cost, layout = cache_cost(config, ONE, 2), CacheLayout.of(config, torch.bfloat16)
    assert cost.kv_token * layout.page_tokens == layout.kv_layers * layout.kv_layer_bytes
    assert cost.state == layout.slot_bytes
    assert cost.kv_token == 27_648 and cost.state == 434_110_464 + 69 * 221_184


def test_what_divides_a_cache() -> None:
    config, one = model_config(None), cache_cost(model_config(None), ONE, 2)
    eight = layout_of("tp", 1, 8)
    assert cache_cost(config, eight, 1).kv_token == one.kv_token / 2  # whole on every rank, in half the bytes
    assert cache_cost(config, eight, 1, dcp=8).kv_token == one.kv_token / 16
    assert cache_cost(config, eight, 2).state == one.state / 8
    assert cache_cost(config, layout_of("dep", 2, 8), 2).sequences(1 << 20, 64e9) == 16 * one.sequences(1 << 20, 64e9)


def test_both_answers_are_shown(plan: Plan) -> None:
    fit = plan("--hardware b300 --json").json["fit"]
    assert (fit["vram_min_gb"], fit["available_gb"], fit["ok"], fit["headroom_gb"]) == (1680, 2144, True, 464)
    manifest = fit["manifest"]
    assert manifest["ok"] and manifest["weights_gb"] == 1560.86
    (gpu,) = manifest["per_gpu"]
    assert gpu["kv_bytes_per_token"] == 13_824 and gpu["context"] == 1 << 20 and gpu["max_concurrency"] == 3
    assert gpu["device_gb"] == 268 and gpu["budget_gb"] == pytest.approx(268 * 0.95)
    inside = gpu["weights_gb"] + gpu["activations_gb"] + gpu["kv_gb"] + gpu["state_gb"] + gpu["headroom_gb"]
    assert inside == pytest.approx(gpu["budget_gb"], abs=0.1)


def test_what_is_asked_for_counts(plan: Plan) -> None:
    def headroom(args: str) -> float:
        answer = plan(f"--hardware b300 {args} --json")
        assert answer.code == 0, answer.err
        return answer.json["fit"]["manifest"]["per_gpu"][0]["headroom_gb"]

    base = headroom("--context 131072 --concurrency 4")
    assert headroom("--context 131072 --concurrency 8") < base
    assert headroom("--context 262144 --concurrency 4") < base
    assert headroom("--context 131072 --concurrency 4 --features text_only") > base
    assert headroom("--context 131072 --concurrency 4 --features decode_context_parallelism") > base
    assert headroom("--context 131072 --concurrency 4 --set '--kv-cache-dtype bfloat16'") < base
    assert headroom("--context 131072 --concurrency 4 --set '--max-num-batched-tokens 32768'") < base
    assert headroom("--context 131072 --concurrency 4 --set '--gpu-memory-utilization 0.97'") > base
    assert headroom("--context 131072 --concurrency 4 --set --enforce-eager") >= base


def test_nodes_are_added_for_the_cache_asked_for(plan: Plan) -> None:
    args = "--hardware h200 --strategy multi_node_tp_pp --context 32768"
    few, many = (plan(f"{args} --concurrency {n} --json").json for n in (1, 150))
    assert few["nodes"] == 2 < many["nodes"]
    assert many["fit"]["manifest"]["per_gpu"][0]["max_concurrency"] >= 150
    assert plan(f"{args} --concurrency 150 --nodes 2").code == 2


def test_a_plan_that_fits_the_constant_alone_says_so(plan: Plan) -> None:
    document = plan("--hardware b200 --strategy multi_node_dep --json").json
    assert document["fit"]["ok"] and not document["fit"]["manifest"]["ok"]
    assert "weights alone do not fit" in document["warnings"][0]
    assert plan("--hardware b200 --strategy multi_node_dep --nodes 2 --concurrency 1").code == 2


def test_a_copy_of_the_recipe_s_model_keeps_its_bars(plan: Plan, tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "model" / "configs" / "kimi_k3.json"
    (tmp_path / "config.json").write_text(source.read_text("utf-8"))
    document = plan(f"--hardware b300 --model {tmp_path} --json").json
    assert document["min_gpus"]["required"] == 8 and document["fit"]["vram_min_gb"] == 1680
    assert document["launches"][0]["argv"][2] == str(tmp_path)


def test_another_model_is_planned_by_its_own_bytes(plan: Plan, nano_dir: Path) -> None:
    document = plan(f"--hardware h200 --model {nano_dir} --json").json
    assert document["min_gpus"]["required"] == 1
    assert "--tensor-parallel-size 1 " in " ".join(document["launches"][0]["argv"])
    total = sum(spec.nbytes for spec in expected_tensors(ModelConfig.from_json(nano_dir)))
    assert document["fit"]["manifest"]["weights_gb"] == round(total / 1e9, 3)
    assert any("not the recipe's model" in warning for warning in document["warnings"])


def test_a_length_beyond_another_model_is_refused_with_its_own(plan: Plan, nano_dir: Path) -> None:
    answer = plan(f"--hardware b200 --model {nano_dir}")
    limit = ModelConfig.from_json(nano_dir).max_position_embeddings
    assert answer.code == 2 and f"--set '--max-model-len {limit}'" in answer.err, answer.err
