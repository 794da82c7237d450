"""The worked examples, argv for argv and variable for variable, and what is said about what each flag overrode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Answer
from .examples import EXAMPLES, PD, Example

Plan = Callable[[str], Answer]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_worked_example(example: Example, plan: Plan) -> None:
    answer = plan(example.args + " --json")
    assert answer.code == 0, answer.err
    launch = next(launch for launch in answer.json["launches"] if launch["role"] == example.role)
    assert launch["argv"] == example.argv
    assert list(launch["env"].items()) == list(example.environment.items())


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_published_recipe_plans_the_same(example: Example, plan: Plan, shared_data: Callable[[str], Path]) -> None:
    recipe = shared_data("kimi_k3_recipe.yaml")
    ours, theirs = plan(example.args + " --json").json, plan(f"{example.args} --recipe {recipe} --json").json
    assert theirs["launches"] == ours["launches"]
    assert theirs["fit"] == ours["fit"] and theirs["min_gpus"] == ours["min_gpus"]


def _decision(document: dict[str, Any], flag: str) -> dict[str, Any]:
    return next(decision for decision in document["decisions"] if decision["flag"] == flag)


def test_every_flag_names_its_layer_and_what_it_overrode(plan: Plan) -> None:
    document = plan(EXAMPLES["hopper over base"].args + " --json").json
    flags = [token for token in document["launches"][0]["argv"] if token.startswith("--")]
    assert [decision["flag"] for decision in document["decisions"]] == flags
    assert _decision(document, "--gpu-memory-utilization") == {
        "role": "server",
        "flag": "--gpu-memory-utilization",
        "value": "0.97",
        "layer": "hardware:hopper",
        "overrode": [{"layer": "model", "value": "0.95"}],
    }
    timeout = next(d for d in document["env_decisions"] if d["name"] == "VLLM_ENGINE_READY_TIMEOUT_S")
    assert timeout["layer"] == "hardware:hopper"


def test_contradictions_are_unified_and_reported(plan: Plan) -> None:
    document = plan(EXAMPLES["flags of the user"].args + " --json").json
    warnings = "\n".join(document["warnings"])
    assert (
        "--enable-prefix-caching (hardware:blackwell) and --no-enable-prefix-caching (--set) are one flag" in warnings
    )
    assert "--gpu-memory-utilization 0.95 (model) and --gpu-memory-utilization=0.9 (--set) are one flag" in warnings
    assert "--tool-call-parser other (--set) loses to --tool-call-parser kimi_k3 (feature:tool_calling)" in warnings
    overrode = _decision(document, "--gpu-memory-utilization")["overrode"]
    assert overrode == [{"layer": "model", "value": "0.95", "written": "--gpu-memory-utilization"}]


def test_a_dropped_feature_has_its_reason(plan: Plan) -> None:
    features = plan(EXAMPLES["pipeline"].args + " --json").json["features"]
    assert features["enabled"] == ["tool_calling", "reasoning"]
    assert [drop["name"] for drop in features["dropped"]] == ["spec_decoding"]
    assert "vllm#50098" in features["dropped"][0]["reason"]


@pytest.mark.parametrize(
    ("example", "rank", "expected"),
    [
        ("hopper over base", 1, "--nnodes 2 --node-rank 1 --master-addr $HEAD_IP --headless"),
        ("pipeline", 1, "--nnodes 2 --node-rank 1 --master-addr $HEAD_IP --headless"),
        ("experts over trays", 3, "--data-parallel-address $HEAD_IP --data-parallel-start-rank 12"),
        ("experts over nodes", 1, "--data-parallel-address $HEAD_IP --data-parallel-start-rank 8"),
        ("ascend", 2, "--data-parallel-address $HEAD_IP --data-parallel-start-rank 2"),
    ],
)
def test_workers_differ_in_their_rank_alone(example: str, rank: int, expected: str, plan: Plan) -> None:
    launches = plan(EXAMPLES[example].args + " --json").json["launches"]
    worker = launches[rank]
    assert (worker["node"], worker["rank"]) == (rank, rank)
    assert f" {expected} " in " ".join(worker["argv"])
    assert worker["env"] == launches[0]["env"]


def test_pools_have_their_own_nodes_and_a_router(plan: Plan) -> None:
    document = plan(PD + " --json").json
    places = [(launch["role"], launch["node"]) for launch in document["launches"]]
    assert places == [("prefill", 0), ("prefill", 1), *(("decode", node) for node in range(4))]
    hosts = [launch["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] for launch in document["launches"]]
    assert hosts == ["$PREFILL_NODE_1", "$PREFILL_NODE_2", *(f"$DECODE_NODE_{node}" for node in range(1, 5))]
    assert "--headless" in document["launches"][1]["argv"]
    decode = " ".join(document["launches"][4]["argv"])
    assert "--data-parallel-start-rank 8 --data-parallel-address $DECODE_NODE_1" in decode
    expected = "vllm-router --policy round_robin --vllm-pd-disaggregation --prefill http://$PREFILL_NODE_1:8001"
    expected += "".join(f" --decode http://$DECODE_NODE_{node}:8002" for node in range(1, 5))
    expected += " --host $ROUTER_HOST --port $ROUTER_PORT --intra-node-data-parallel-size 1"
    assert document["router"]["argv"] == expected.split()


def test_variables_for_nvlink_are_left_out_elsewhere(plan: Plan) -> None:
    document = plan("--hardware b200 --strategy pd_cluster --json").json
    names = {name for launch in document["launches"] for name in launch["env"]}
    assert not names & {"NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE", "UCX_NET_DEVICES"}
    assert any("NCCL_MNNVL_ENABLE" in warning for warning in document["warnings"])
