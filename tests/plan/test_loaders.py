"""Recipes, inventories and traces from files: what is malformed is one line that names the file and the key."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import InputError, K3HALError
from k3hal.plan.inventory import read_inventory
from k3hal.plan.nearest import plan_or_refuse
from k3hal.plan.recipe import Recipe
from k3hal.plan.recipe_toml import builtin_recipe, read_toml
from k3hal.plan.recipe_yaml import read_recipe, read_yaml
from k3hal.plan.request import PlanRequest
from k3hal.plan.trace import read_workload

from .conftest import Answer

Plan = Callable[[str], Answer]

SMALL: dict[str, Any] = {
    "meta": {"slug": "small", "default_hardware": "b300", "hardware": {"b300": "verified"}},
    "model": {"model_id": "org/small", "architecture": "moe", "base_args": ["--trust-remote-code"]},
    "features": {"tool_calling": {"description": "x", "args": ["--enable-auto-tool-choice"]}},
    "opt_in_features": [],
    "variants": {"default": {"precision": "bf16", "vram_minimum_gb": 100, "supported_hardware": ["b300", "mi355x"]}},
    "compatible_strategies": ["single_node_tp", "pd_cluster"],
    "strategy_hardware": {"multi_node_tp": {"blackwell": "supported", "default": "unsupported"}},
    "strategy_min_gpus": {"single_node_tp": 1, "b300": {"single_node_tp": 2}},
    "hardware_overrides": {"nvidia": {"extra_args": ["--max-num-seqs", 64], "extra_env": {"A": 1}}},
    "strategy_overrides": {"pd_cluster": {"prefill": {"parallelism": "tp"}, "decode": {"parallelism": "dep", "tp": 2}}},
}


def _recipe(**changes: Any) -> Recipe:
    return read_yaml(yaml.safe_dump({**SMALL, **changes}), "small.yaml")


def test_our_data_say_what_the_published_recipe_says(shared_data: Callable[[str], Path]) -> None:
    theirs, ours = read_recipe(shared_data("kimi_k3_recipe.yaml")), builtin_recipe()
    features = {name: dataclasses.replace(feature, reason="") for name, feature in ours.features.items()}
    for name in ("model_id", "base", "variants", "baseline", "min_gpus", "verified", "default_strategy"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.features == features
    assert {name: theirs.rules(name) for name in ours.strategies} == ours.strategies
    assert theirs.unused == ("model.default_frontend",)


def test_a_small_recipe(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    document = plan(f"--recipe {tmp_path}/small.yaml --hardware b300 --json").json
    argv = " ".join(document["launches"][0]["argv"])
    # One GPU holds the weights, and the `nvidia` entry stands for Blackwell.
    assert argv == (
        "vllm serve org/small --trust-remote-code --tensor-parallel-size 1 --max-num-seqs 64 --enable-auto-tool-choice"
    )
    assert document["launches"][0]["env"] == {"A": "1"}
    assert document["min_gpus"]["required"] == 2 and document["fit"]["manifest"] is None
    assert any("manifest of org/small is not known" in warning for warning in document["warnings"])


def test_support_is_looked_up_by_gpu_generation_brand_and_default(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    common = f"--recipe {tmp_path}/small.yaml --strategy multi_node_tp --hardware"
    assert plan(f"{common} b300").code == 0
    assert "does not support multi_node_tp on mi355x" in plan(f"{common} mi355x").err


MALFORMED = {
    "a list": "[1, 2]",
    "nothing": "",
    "not yaml": "{a: [",
    "a tab": "a:\n\t- b",
    "no model": "{meta: {}}",
    "model a text": "{model: text}",
    "variants a list": "{model: {model_id: m}, variants: [1]}",
    "memory a text": "{model: {model_id: m}, variants: {default: {vram_minimum_gb: much}}}",
    "memory negative": "{model: {model_id: m}, variants: {default: {vram_minimum_gb: -4}}}",
    "memory a switch": "{model: {model_id: m}, variants: {default: {vram_minimum_gb: true}}}",
    "memory not finite": "{model: {model_id: m}, variants: {default: {vram_minimum_gb: .inf}}}",
    "arguments a text": "{model: {model_id: m, base_args: --x}}",
    "arguments a mapping inside": "{model: {model_id: m, base_args: [{a: b}]}}",
    "environment a list": "{model: {model_id: m, base_env: [a]}}",
    "environment nested": "{model: {model_id: m, base_env: {a: {b: c}}}}",
    "verdict": "{model: {model_id: m}, strategy_hardware: {single_node_tp: {b300: perhaps}}}",
    "bar a text": "{model: {model_id: m}, strategy_min_gpus: {single_node_tp: eight}}",
    "bar zero": "{model: {model_id: m}, strategy_min_gpus: {b300: 0}}",
    "bar a half": "{model: {model_id: m}, strategy_min_gpus: {b300: 1.5}}",
    "a key twice": "{model: {model_id: m}, variants: {default: {vram_minimum_gb: 1, vram_minimum_gb: 2}}}",
    "a variable's name": "{model: {model_id: m, base_env: {'A=1; reboot; B': 1}}}",
    "role": "{model: {model_id: m}, strategy_overrides: {pd_cluster: {prefill: {parallelism: tp_pp}}}}",
    "numbers as keys": "{1: 2}",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("flag", ["--recipe", "--lint"])
def test_malformed_recipe_is_one_line(name: str, flag: str, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(MALFORMED[name])
    hardware = "" if flag == "--lint" else "--hardware b300"
    answer = plan(f"{hardware} {flag} {tmp_path}/r.yaml")
    assert answer.code == 4 and answer.err.count("\n") == 1 and "r.yaml" in answer.err, answer.err


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"schema = 1", b"a = [", b'schema = "k3hal.recipe/2"'])
def test_malformed_recipe_of_ours(content: bytes, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(content)
    answer = plan(f"--hardware b300 --recipe {tmp_path}/r.toml")
    assert answer.code == 4 and answer.err.count("\n") == 1 and "r.toml" in answer.err, answer.err


@pytest.mark.parametrize("flag", ["--recipe", "--lint", "--inventory", "--workload trace:"])
def test_an_absent_file_is_one_line(flag: str, plan: Plan) -> None:
    hardware = "" if flag in ("--inventory", "--lint") else "--hardware b300 "
    answer = plan(hardware + (f"{flag}nowhere" if flag.endswith(":") else f"{flag} nowhere"))
    assert answer.code == 4 and "nowhere: cannot read" in answer.err


def test_an_unknown_key_of_ours_is_an_error_and_of_a_published_recipe_a_warning(plan: Plan, tmp_path: Path) -> None:
    text = 'schema = "k3hal.recipe/1"\nid = "a"\nmodel_id = "b"\narchitecture = "moe"\ncontext_length = 8\n'
    with pytest.raises(InputError, match="unknown key 'extra'"):
        read_toml(text + 'default_strategy = "single_node_tp"\nextra = 1\n', "r.toml")
    changed = copy.deepcopy(SMALL)
    changed["variants"]["default"]["surprise"] = 1
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(changed))
    warnings = plan(f"--hardware b300 --recipe {tmp_path}/r.yaml --json").json["warnings"]
    assert any("not planned with: variants.default.surprise" in warning for warning in warnings)


_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 300), st.text(max_size=6), st.just([]), st.just({}))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    out = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return out + [inner for key, child in items for inner in _paths(child, (*path, key))]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(_paths(SMALL)), _LEAVES)
def test_one_changed_field_is_planned_or_refused(path: tuple[Any, ...], leaf: Any) -> None:
    """Whatever stands in one place of a recipe, planning ends in a plan or in one of our errors, on one line."""
    from k3hal.plan.hardware import known_hardware

    changed: Any = copy.deepcopy(SMALL)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = leaf
    try:
        recipe = read_yaml(yaml.safe_dump(changed), "small.yaml")
        for strategy in (None, "pd_cluster"):
            request = PlanRequest(
                recipe=recipe,
                hardware=known_hardware()["b300"],
                strategy=strategy,
                features=recipe.default_features,
            )
            plan_or_refuse(request)
    except K3HALError as error:
        told = error
    else:
        return
    assert "\n" not in told.message and told.exit_code in (2, 4), told


INVENTORIES = {
    "empty": "",
    "a mapping": "{hardware: b300}",
    "a text inside": "- b300",
    "no hardware": "- {nodes: 2}",
    "unknown hardware": "- {hardware: b301}",
    "unknown key": "- {hardware: b300, node: 2}",
    "no nodes": "- {hardware: b300, nodes: 0}",
    "half a node": "- {hardware: b300, nodes: 1.5}",
    "too many": "- {hardware: b300, nodes: 1000000000}",
    "too many in all": "- {hardware: b300, nodes: 9000}\n" * 2,
    "too large": "- {hardware: b300}\n" * 60_000,
    "a key twice": "- {hardware: b300, nodes: 1, nodes: 3}",
    "more GPUs than there are": "- {hardware: b300, gpus: 16}",
    "not yaml": "- {",
}


@pytest.mark.parametrize("name", INVENTORIES)
def test_malformed_inventory_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "i.yaml").write_text(INVENTORIES[name])
    with pytest.raises(InputError, match=r"i\.yaml") as caught:
        read_inventory(tmp_path / "i.yaml")
    assert "\n" not in str(caught.value)


GOOD = {"timestamp": 0, "input_length": 5, "output_length": 5}
TRACES = {
    "empty": "",
    "one request": json.dumps(GOOD),
    "not json": f"{json.dumps(GOOD)}\n{{",
    "a list": "[]\n[]",
    "no time": json.dumps({"input_length": 5, "output_length": 5}),
    "negative time": json.dumps({**GOOD, "timestamp": -1}),
    "a text": json.dumps({**GOOD, "input_length": "5"}),
    "a switch": json.dumps({**GOOD, "input_length": True}),
    "not a number": '{"timestamp": NaN, "input_length": 5, "output_length": 5}',
    "endless": '{"timestamp": 0, "input_length": 1e999, "output_length": 5}',
    "nested deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", TRACES)
def test_malformed_trace_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACES[name])
    with pytest.raises(InputError, match=r"t\.jsonl") as caught:
        read_workload(f"trace:{tmp_path}/t.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("args", ["--lint DEV", "--hardware b300 --recipe DEV", "--inventory DEV"])
def test_a_file_without_an_end_is_too_large(args: str, plan: Plan) -> None:
    answer = plan(args.replace("DEV", "/dev/zero"))
    assert answer.code == 4 and "/dev/zero: too large for" in answer.err


def test_a_line_without_an_end_is_too_long(plan: Plan) -> None:
    answer = plan("--hardware b300 --workload trace:/dev/zero")
    assert answer.code == 4 and "/dev/zero line 1: longer than" in answer.err


def test_a_recipe_from_a_pipe_is_linted(plan: Plan) -> None:
    """A pipe can be read once."""
    reader, writer = os.pipe()
    os.write(writer, yaml.safe_dump(SMALL).encode())
    os.close(writer)
    answer = plan(f"--lint /dev/fd/{reader}")
    os.close(reader)
    assert answer.code == 1 and "finding" in answer.out
