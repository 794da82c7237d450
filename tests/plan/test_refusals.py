"""What cannot work is refused in one line with the nearest plan that works; what is mistyped is a usage error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import UsageError
from k3hal.plan.document import document
from k3hal.plan.hardware import Hardware, known_hardware
from k3hal.plan.nearest import plan_or_refuse
from k3hal.plan.recipe_toml import builtin_recipe
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest, user_tokens
from k3hal.plan.strategies import known_strategies
from k3hal.plan.text import plan_text

from .conftest import Answer

Plan = Callable[[str], Answer]

REFUSALS = {
    "--hardware h100 --strategy single_node_tp": ("needs 32 GPUs .* a node has 8", "multi_node_tp --nodes 4"),
    "--hardware h100 --strategy multi_node_dep": ("does not support multi_node_dep on h100", "--hardware h100"),
    "--hardware h200 --strategy multi_node_dep": ("does not support multi_node_dep on h200", "--hardware h200"),
    "--hardware b200": ("1440 GB, and the weights need 1680 GB", "--strategy multi_node_tp_pp --nodes 2"),
    "--hardware gb200 --strategy multi_node_tp --nodes 2": ("needs 16, that is 4 nodes", "multi_node_tp --nodes 4"),
    "--hardware gb200 --strategy multi_node_tep --nodes 2": ("1536 GB, .* 1680 GB", "multi_node_tep --nodes 4"),
    "--hardware b300 --strategy multi_node_tp_dp": ("multi_node_tp_dp on b300: only h200", "--hardware b300"),
    "--hardware mi355x --variant nvfp4": ("needs NVIDIA Blackwell", "--hardware mi355x .* --variant default"),
    "--hardware ascend_910c": ("does not support ascend_910c", "multi_node_tp_dp --variant ascend_w4a8 --nodes 4"),
    "--hardware ascend_910c --variant ascend_w4a8 --strategy single_node_tp": ("needs 64 GPUs", "multi_node_tp_dp"),
    "--hardware mi355x --features decode_context_parallelism": ("NVIDIA only; mi355x is AMD", "--features none"),
    "--hardware mi355x --set '--attention-backend TOKENSPEED_MLA'": ("NVIDIA only", "--hardware mi355x"),
    "--hardware b300 --features text_only,encoder_parallel": ("exclude each other", "leave out encoder_parallel"),
    "--hardware b300 --features decode_context_parallelism --set '--tensor-parallel-size 4'": (
        "parallelism of 8 does not divide a tensor-parallel size of 4",
        "--hardware b300",
    ),
    "--hardware b300 --context 131072 --concurrency 4000": ("are missing on each GPU", "--concurrency 25"),
    "--hardware b300 --context 2000000": ("2000000 is beyond the 1048576 tokens", "the model has 1048576"),
    "--hardware b300 --context 99999999999": ("beyond the 1048576 tokens", "--nodes 1 --context 1048576"),
    "--hardware b300 --nodes 9000000000000000": ("runs on at most 1 node", "single_node_tp --nodes 1"),
    "--hardware b200 --kv-offload 64": ("need 1680 GB", "--nodes 2 --kv-offload 64"),
    "--hardware b300 --set '--max-model-len 2000000'": ("beyond the model's 1048576", "--hardware b300"),
    "--hardware gb200 --strategy pd_cluster --nodes 3": ("more than 3 nodes", "--hardware gb200"),
    "--hardware h200 --strategy multi_node_tp --nodes 20": ("20 nodes", "multi_node_tp --nodes 2"),
    "--hardware b300 --set '-tp 16'": ("ask for 16 GPUs .* the plan has 8", "single_node_tp --nodes 1"),
    "--hardware b300 --set '--data-parallel-size 2'": ("ask for 16 GPUs", "single_node_tp --nodes 1"),
    "--hardware b300 --set '-tp 5'": ("5 does not divide the model's 96 heads", "single_node_tp --nodes 1"),
    "--hardware b300 --set '-tp 4' --context 1000": ("weights alone do not fit", "--hardware b300"),
    "--hardware ascend_950": ("no recipe is for it", "recipes are for .*b300"),
}


UNUSABLE = [
    "-",
    "--",
    "--=",
    "-=5",
    "---x 5",
    "--max-model-len",
    "--max-model-len=",
    "--no-max-model-len",
    "--max-num-batched-tokens",
    "--tool-call-parser",
    "--trust-remote-code=false",
    "--enable-prefix-caching true",
    "--kv-cache-dtype fp9",
    "--compilation-config []",
    "--speculative-config ngram",
    "--tensor-parallel-size 0",
    "--tensor-parallel-size all",
    "--model other",
]


@pytest.mark.parametrize("args", REFUSALS)
def test_refusal_is_one_line_with_the_nearest_plan(args: str, plan: Plan) -> None:
    message, hint = REFUSALS[args]
    answer = plan(args + " --json")
    assert answer.code == 2 and answer.err.count("\n") == 1, answer.err
    (error,) = answer.json["errors"]
    assert re.search(message, error["message"]), error["message"]
    assert re.search(hint, error["hint"]), error["hint"]


@pytest.mark.parametrize("args", [args for args in REFUSALS if "encoder_parallel" not in args and "950" not in args])
def test_the_nearest_plan_is_one(args: str, plan: Plan) -> None:
    hint = plan(args + " --json").json["errors"][0]["hint"]
    command = hint.rpartition("nearest plan that works: k3hal plan ")[2]
    answer = plan(command + " --json")
    assert answer.code == 0, (command, answer.err)


@pytest.mark.parametrize(
    "args",
    [
        "--hardware b301",
        "--hardware b300 --strategy mutli_node_tp",
        "--hardware b300 --variant nvfp5",
        "--hardware b300 --features tool_caling",
        "--hardware b300 --features reasoning,reasoning",
        "--hardware b300 --set max-model-len",
        "--hardware b300 --set '--quote \"'",
        "--hardware b300 --set '--node-rank 3'",
        "--hardware b300 --set '--max-model-len many'",
        "--hardware b300 --set '--gpu-memory-utilization 1.5'",
        "--hardware b300 --nodes 0",
        "--hardware b300 --set '--compilation-config {'",
        "--hardware b300 --decode-nodes 2",
        "--hardware gb200 --strategy pd_cluster --nodes 6 --decode-nodes 4",
        "--hardware b300 --for sglang",
        "--hardware b300 --shell --json",
        "--hardware b300 --picture x.svg",
        "--hardware b300 --model nowhere",
        "--hardware b300 --workload file",
        "--hardware b300 --p95 0",
        "--hardware b300 --p95 5",
        "--hardware b300 --storage 5",
        "--hardware b300 --kv-offload 1e-300",
        "--hardware ''",
        "--hardware b300 --strategy ''",
        "--hardware b300 --features ' '",
        "--hardware b300 --workload ''",
        "--hardware b300 --set ''",
        "--hardware cuda:x",
        "--lint r.yaml --hardware b300",
        "--lint r.yaml --matrix",
        "--matrix --strategy multi_node_tp",
        "--matrix --inventory r.yaml",
        *(f"--hardware b300 --set '{text}'" for text in UNUSABLE),
    ],
)
def test_usage_error_is_one_line(args: str, plan: Plan) -> None:
    answer = plan(args)
    assert answer.code == 4 and answer.err.count("\n") == 1, answer.err
    assert "bug" not in answer.err


FLAGS = ["--max-model-len 4096", "--max-num-seqs=2", "--no-enable-prefix-caching", "-tp 3", "--x -1", "--y", "-dcp 5"]


@settings(max_examples=200, deadline=None)
@given(
    hardware=st.sampled_from(list(known_hardware().values())),
    gpus=st.integers(1, 16),
    strategy=st.one_of(st.none(), st.sampled_from(list(known_strategies()))),
    variant=st.one_of(st.none(), st.sampled_from(list(builtin_recipe().variants))),
    features=st.lists(st.sampled_from(list(builtin_recipe().features)), unique=True),
    counts=st.tuples(*[st.one_of(st.none(), st.integers(1, 20))] * 5),
    sets=st.lists(st.sampled_from(FLAGS), max_size=3),
)
def test_any_request_is_a_plan_or_an_error_of_one_line(
    hardware: Hardware,
    gpus: int,
    strategy: str | None,
    variant: str | None,
    features: list[str],
    counts: tuple[int | None, ...],
    sets: list[str],
) -> None:
    size = min(gpus, hardware.gpus)
    request = PlanRequest(
        recipe=builtin_recipe(),
        hardware=replace(hardware, gpus=size, node_gb=hardware.gpu_gb * size),
        strategy=strategy,
        variant=variant,
        features=tuple(features),
        nodes=counts[0],
        prefill_nodes=counts[1],
        decode_nodes=counts[2],
        context=counts[3] and counts[3] * 4096,
        concurrency=counts[4],
        user_args=user_tokens(sets),
    )
    try:
        made = plan_or_refuse(request)
    except (RefusedPlanError, UsageError) as error:
        told = error
    else:
        assert json.loads(json.dumps(document(made), allow_nan=False)) == document(made)
        assert "\n" not in "".join(made.warnings) and list(plan_text(made))
        return
    assert "\n" not in str(told)


def test_flags_of_a_pool_that_the_hardware_overrides_are_told(plan: Plan) -> None:
    warnings = "\n".join(plan("--hardware mi355x --strategy pd_cluster --json").json["warnings"])
    assert "--max-num-seqs 8 (role:decode) loses to --max-num-seqs 128 (hardware:amd)" in warnings


def test_flags_over_the_computed_layout_are_told(plan: Plan) -> None:
    warnings = plan("--hardware b300 --set '-tp 4' --json").json["warnings"]
    assert any("-tp 4 (--set) overrides the computed layout" in warning for warning in warnings)


def test_memory_is_that_of_the_sizes_that_stand(plan: Plan) -> None:
    """Half of the GPUs hold twice the experts, and two stages of half of the GPUs what one of all does."""
    weights = [
        plan(f"--hardware b300 --json {own}").json["fit"]["manifest"]["per_gpu"][0]["weights_gb"]
        for own in ("", "--set '-tp 4'", "--set '-tp 4 -pp 2'")
    ]
    assert 1.9 * weights[0] < weights[1] < 2 * weights[0] and abs(weights[2] / weights[0] - 1) < 0.05


def test_kv_offload_is_given_as_said(plan: Plan) -> None:
    argv = plan("--hardware b300 --kv-offload 1234567.5 --json").json["launches"][0]["argv"]
    assert argv[argv.index("--kv-offloading-size") + 1] == "1234567.5"


def test_kv_offload_comes_last(plan: Plan) -> None:
    argv = plan("--hardware b300 --kv-offload 64 --json").json["launches"][0]["argv"]
    assert argv[-4:] == ["--kv-offloading-size", "64", "--kv-offloading-backend", "native"]


def test_a_wrong_strategy_raises_for_callers_too() -> None:
    request = PlanRequest(recipe=builtin_recipe(), hardware=known_hardware()["b300"], strategy="none")
    with pytest.raises(UsageError, match="no strategy is called 'none'"):
        plan_or_refuse(request)
