"""Every cell of strategies x machines x variants is a plan that holds together or a refusal in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from k3hal.plan.document import document
from k3hal.plan.gate import least_gpus, reach_refusal, strategy_refusal
from k3hal.plan.hardware import known_hardware
from k3hal.plan.nearest import plan_or_refuse
from k3hal.plan.recipe_toml import builtin_recipe
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest
from k3hal.plan.strategies import known_strategies

from .conftest import Answer

Plan = Callable[[str], Answer]

STRATEGIES = [
    "single_node_tp",
    "multi_node_tp",
    "multi_node_tep",
    "multi_node_tp_pp",
    "multi_node_dep",
    "multi_node_tp_dp",
    "pd_cluster",
]
NO = None
# Fewest GPUs and nodes by strategy, in the order above up to multi_node_tp_dp; None is not supported.
BARS: dict[str, list[tuple[int, int] | None]] = {
    "h100": [(32, 4), (32, 4), (32, 4), (32, 4), NO, NO],
    "h200": [(8, 1), (8, 1), (8, 1), (16, 2), NO, (16, 2)],
    "b200": [(8, 1), (8, 1), (8, 1), (16, 2), (16, 2), NO],
    "b300": [(8, 1), (8, 1), (8, 1), (16, 2), (16, 2), NO],
    "gb200": [(8, 2), (16, 4), (8, 2), (16, 4), (16, 4), (16, 4)],
    "gb300": [(8, 2), (8, 2), (8, 2), (16, 4), (16, 4), (16, 4)],
    "mi300x": [(8, 1), (8, 1), (8, 1), (16, 2), (16, 2), NO],
    "mi325x": [(8, 1), (8, 1), (8, 1), (16, 2), (16, 2), NO],
    "mi355x": [(8, 1), (8, 1), (8, 1), (16, 2), (16, 2), NO],
    "ascend_910c": [(64, 4), NO, NO, NO, NO, (64, 4)],
}
ALONE = {"b300", "mi325x", "mi355x"}
"""Machines whose one node holds the default variant."""


def test_the_matrix_is_complete() -> None:
    assert list(BARS) == list(known_hardware()) and len(builtin_recipe().variants) == 3
    assert set(STRATEGIES) <= set(known_strategies())


@pytest.mark.parametrize("name", BARS)
def test_bars(name: str) -> None:
    recipe, hardware = builtin_recipe(), known_hardware()[name]
    for strategy, expected in zip(STRATEGIES, BARS[name], strict=False):
        facts = known_strategies()[strategy]
        supported = strategy_refusal(recipe, facts, hardware) is None
        bar = least_gpus(recipe, facts, hardware)
        assert ((bar.required, bar.nodes(hardware)) if supported else None) == expected, strategy
        unreachable = name in ("h100", "gb200", "gb300", "ascend_910c") and strategy == "single_node_tp"
        assert bool(reach_refusal(facts, hardware, bar)) == unreachable, strategy
    pd = strategy_refusal(recipe, known_strategies()["pd_cluster"], hardware)
    assert (pd is None) == (name != "ascend_910c")


def test_the_matrix_is_shown(plan: Plan) -> None:
    cells = plan("--matrix --json").json["cells"]
    assert len(cells) == 7 * 10 * 3
    for cell in cells:
        assert (cell["nodes"] is None) == (cell["refusal"] is not None)
        assert cell["supported"] or not cell["reachable"]
        if cell["variant"] != "default" or cell["hardware"] == "ascend_910c" or cell["strategy"] == "pd_cluster":
            continue
        expected = BARS[cell["hardware"]][STRATEGIES.index(cell["strategy"])]
        assert ((cell["min_gpus"], cell["min_nodes"]) if cell["supported"] else None) == expected
    alone = {
        c["hardware"] for c in cells if c["strategy"] == "single_node_tp" and c["nodes"] and c["variant"] == "default"
    }
    assert alone == ALONE
    lines = plan("--matrix --variant default").out.splitlines()
    row = next(line for line in lines if line.startswith("gb200"))
    assert "too few GPUs" in row and "4 (16)" in row and "4 (16) !" in row
    assert plan("--matrix --variant none").code == plan("--matrix --hardware b300").code == 4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hardware", BARS)
@pytest.mark.parametrize("variant", ["default", "nvfp4", "ascend_w4a8"])
def test_cell(variant: str, hardware: str, strategy: str) -> None:
    recipe = builtin_recipe()
    for features in (recipe.default_features, tuple(recipe.features), ()):
        request = PlanRequest(
            recipe=recipe,
            hardware=known_hardware()[hardware],
            strategy=strategy,
            variant=variant,
            features=features,
        )
        try:
            made = plan_or_refuse(request)
        except RefusedPlanError as error:
            refused = error
        else:
            _check(document(made), request)
            continue
        assert "\n" not in str(refused) and "nearest plan that works: k3hal plan --hardware" in refused.hint


def _check(made: dict[str, Any], request: PlanRequest) -> None:
    """What holds of every plan."""
    hardware = request.hardware
    assert made["nodes"] == len(made["launches"]) and made["nodes"] * hardware.node_gb >= made["fit"]["vram_min_gb"]
    assert made["nodes"] * hardware.gpus >= made["min_gpus"]["required"]
    for launch in made["launches"]:
        argv = launch["argv"]
        assert argv[:2] == ["vllm", "serve"] and all(isinstance(v, str) for v in launch["env"].values())
        flags = [token.removeprefix("--no-").removeprefix("--") for token in argv if token.startswith("--")]
        assert len(flags) == len(set(flags))
        if hardware.brand != "NVIDIA":
            assert not any(word in token for token in argv for word in ("TOKENSPEED", "TRTLLM", "FLASHMLA"))
    enabled, dropped = made["features"]["enabled"], [drop["name"] for drop in made["features"]["dropped"]]
    assert sorted([*enabled, *dropped]) == sorted(request.features)


@pytest.mark.parametrize(
    ("hardware", "strategy"),
    [("b300", "single_node_tp"), ("h100", "multi_node_tp"), ("gb300", "multi_node_tp"), ("gb200", "multi_node_tp")],
)
def test_default_strategy(hardware: str, strategy: str, plan: Plan) -> None:
    assert plan(f"--hardware {hardware} --json").json["strategy"] == strategy


def test_default_strategy_of_the_910c(plan: Plan) -> None:
    assert plan("--hardware ascend-910c --variant ascend_w4a8 --json").json["strategy"] == "multi_node_tp_dp"


def test_default_nodes_hold_the_weights(plan: Plan) -> None:
    for name in ("h200", "b200", "mi300x"):
        assert plan(f"--hardware {name} --strategy multi_node_tp --json").json["nodes"] == 2
    for name in ALONE:
        assert plan(f"--hardware {name} --strategy multi_node_tp --json").json["nodes"] == 1
