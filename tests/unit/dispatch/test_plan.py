"""Plans: bound without a wrapper, saved and pinned exactly, refused in one line when they do not fit."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from k3hal.dispatch import policy as policy_module
from k3hal.dispatch.errors import PlanError
from k3hal.dispatch.plan import DispatchPlan, OpRequest, make_plan
from k3hal.dispatch.plan_file import SCHEMA, load_plan, plan_json, save_plan, saved
from k3hal.dispatch.plan_pin import compare_plans, layer_ranges, pin_plan
from k3hal.dispatch.plan_text import plan_summary, plan_table
from k3hal.dispatch.registry import Registry
from k3hal.dispatch.select import FallbackPolicy, Selector

from .toys import CPU, NEVER, Toy, backend_module, registry_of

pytestmark = pytest.mark.usefixtures("toys")

REQUESTS = (
    OpRequest("toy_shift", (), "any", {"size": 4, "scale": 0.5, "kind": None}),
    OpRequest("toy_scale", (0, 1, 2, 5), "prefill"),
    OpRequest("toy_scale", (0, 1, 2, 5), "decode"),
    OpRequest("toy_both", (3, 4)),
)


@pytest.fixture
def registry() -> Registry:
    return registry_of(
        backend_module("b", Toy("toy_shift", "x"), Toy("toy_scale", "x"), Toy("toy_scale", "y"), vendors=("cpu",)),
        backend_module("n", Toy("toy_scale", "z", NEVER), auto=False),
    )


def _plan(registry: Registry, fallback: FallbackPolicy = "strict") -> DispatchPlan:
    return make_plan(REQUESTS, Selector(registry, (), fallback), model="toy", device=CPU, dtype="bfloat16")


def _pin(registry: Registry, path: Path) -> DispatchPlan:
    return pin_plan(load_plan(path), REQUESTS, registry, model="toy", device=CPU, dtype="bfloat16")


def _edited(registry: Registry, path: Path, edit: Any) -> Path:
    """A saved plan whose JSON `edit` has changed."""
    data = plan_json(_plan(registry))
    edit(data)
    path.write_text(json.dumps(data))
    return path


def test_binding_puts_nothing_around_a_provider(registry: Registry) -> None:
    providers = {p.id: p.fn for p in registry.providers if p.op == "toy_scale"}
    ops = _plan(registry).bind()
    assert ops.fn("toy_scale", 5, "decode") is providers["b.x"]
    assert ops.fn("toy_shift") is ops.fn("toy_shift", 7)
    assert ops.fn("toy_both", 3) is ops.fn("toy_both", 4)
    assert ops.prepare("toy_both", 3, weight=2.0) == {"weight": 2.0}
    with pytest.raises(PlanError, match=r"no entry for toy_scale in layer 3, phase decode"):
        ops.fn("toy_scale", 3, "decode")


def test_two_entries_for_one_layer_cannot_be_bound(registry: Registry) -> None:
    requests = (OpRequest("toy_scale", (1, 2)), OpRequest("toy_scale", (2, 3)))
    plan = make_plan(requests, Selector(registry), model="toy", device=CPU, dtype="bfloat16")
    with pytest.raises(PlanError, match="two plan entries for toy_scale in layer 2"):
        plan.bind()


def test_the_json_has_the_pinned_keys(registry: Registry) -> None:
    data = json.loads(json.dumps(plan_json(_plan(registry))))
    assert (data["schema"], data["device"], data["model"]) == (SCHEMA, "cpu", "toy")
    both = data["entries"][3]
    assert (both["op"], both["layers"], both["phase"]) == ("toy_both", [3, 4], "any")
    assert (both["provider"], both["backend"], both["level"]) == ("composed", "dispatch", "E0")
    assert (both["composed"], both["reference"]) == (True, False)
    assert {op: part["provider"] for op, part in both["parts"].items()} == {"toy_shift": "b.x", "toy_scale": "b.x"}
    assert data["entries"][1]["reasons"] == ["priority 50", "b.x: yes"]


def test_saving_and_pinning_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    plan = _plan(registry)
    save_plan(plan, tmp_path / "plan.json")
    pinned = _pin(registry, tmp_path / "plan.json")
    assert compare_plans(saved(plan), saved(pinned)) == ()
    assert pinned.policy == f"pinned by {tmp_path / 'plan.json'}"
    assert pinned.bind().fn("toy_scale", 0, "prefill") is plan.bind().fn("toy_scale", 0, "prefill")
    assert pinned.bind().fn("toy_both", 3)(1.0, 2.0) == 6.0


def test_a_pinned_plan_may_differ_by_layer(registry: Registry, tmp_path: Path) -> None:
    def split(data: dict[str, Any]) -> None:
        decode = data["entries"][2]
        data["entries"].append(decode | {"layers": [1, 5], "provider": "b.y", "dims": None})
        decode["layers"] = [0, 2]

    pinned = _pin(registry, _edited(registry, tmp_path / "plan.json", split))
    ops, fn = pinned.bind(), {p.id: p.fn for p in registry.of("toy_scale")}
    assert [ops.fn("toy_scale", layer, "decode") is fn["b.y"] for layer in (0, 1, 2, 5)] == [False, True, False, True]
    (difference,) = compare_plans(saved(_plan(registry)), saved(pinned))
    assert str(difference) == "toy_scale (decode) in layers 1, 5: b.x -> b.y"


def _set(index: int, **values: Any) -> Any:
    return lambda data: data["entries"][index].update(values)


def _drop(index: int) -> Any:
    return lambda data: data["entries"].pop(index)


def _add(**values: Any) -> Any:
    return lambda data: data["entries"].append(data["entries"][1] | values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_drop(0), "no entry for toy_shift (any)"),
        (_drop(2), "no entry for toy_scale (decode) in layers 0-2, 5"),
        (_set(2, layers=[0, 1]), "no entry for toy_scale (decode) in layers 2, 5"),
        (_set(2, layers=[0, 1, 2, 5, 6]), "the entry for toy_scale (decode) in layer 6 is of no use to this model"),
        (_set(3, phase="verify"), "no entry for toy_both (any) in layers 3-4 (it has toy_both (verify) in layers 3-4)"),
        (_add(op="toy_other", layers=[]), "the entry for toy_other (prefill) is of no use to this model"),
        (_set(0, dims={"size": 8, "scale": 0.5, "kind": None}), "was made for size=8, this model has size=4"),
        (_set(1, provider="gone.x"), "toy_scale (prefill) on cpu: there is no provider 'gone.x'"),
        (_set(1, provider="b.xx"), "did you mean 'b.x'?"),
        (_set(1, provider="n.z"), "n.z cannot run here: never"),
        (_set(1, provider="composed", parts={"toy_shift": {"provider": "b.x"}}), "it is not composed of finer"),
        (
            _set(3, parts={"toy_shift": {"provider": "b.x"}}),
            "composed of toy_shift, toy_scale; the plan gives toy_shift",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(
    registry: Registry, tmp_path: Path, edit: Any, message: str
) -> None:
    path = _edited(registry, tmp_path / "plan.json", edit)
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        _pin(registry, path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("schema"), "'schema' is missing"),
        (lambda d: d.update(schema=1), "'schema' is not a string"),
        (lambda d: d.update(schema="k3hal.op_list/1"), "not a dispatch plan"),
        (lambda d: d.update(schema="k3hal.op_plan/2"), "this version reads 'k3hal.op_plan/1'"),
        (lambda d: d.update(device=None), "'device' is not a string"),
        (lambda d: d.pop("model"), "'model' is missing"),
        (lambda d: d.update(entries={}), "'entries' is not a list"),
        (lambda d: d["entries"].append("x"), "entry 4: not a JSON object"),
        (_set(1, op="toy_skale"), "entry 1: unknown operator 'toy_skale' (did you mean 'toy_scale'?)"),
        (_set(1, op=None), "entry 1: 'op' is not a string"),
        (_set(1, phase="decoding"), "entry 1: phase is 'decoding' (one of prefill, decode, verify, any)"),
        (_set(1, layers="all"), "entry 1: 'layers' is not a list of layer numbers"),
        (_set(1, layers=[-1]), "entry 1: 'layers' is not a list of layer numbers"),
        (_set(1, layers=[True]), "entry 1: 'layers' is not a list of layer numbers"),
        (_set(1, layers=[1, 1]), "entry 1: a second entry for toy_scale (prefill) in layer 1"),
        (_add(), "entry 4: a second entry for toy_scale (prefill) in layer 0"),
        (_set(1, provider=7), "entry 1: 'provider' is not a string"),
        (_set(3, parts={}), "entry 3: provider is 'composed' with 0 parts"),
        (_set(3, provider="b.x"), "entry 3: provider is 'b.x' with 2 parts"),
        (_set(3, parts=["toy_shift"]), "entry 3: 'parts' is not an object"),
        (_set(3, parts={"toy_shift": 1}), "entry 3: part toy_shift: not a JSON object"),
        (_set(3, parts={"nope": {"provider": "b.x"}}), "entry 3: unknown operator 'nope'"),
        (_set(1, dims=[1]), "entry 1: 'dims' is not an object of plain values"),
        (_set(1, dims={"heads": [1]}), "entry 1: 'dims' is not an object of plain values"),
    ],
)
def test_a_malformed_plan_file_is_refused_in_one_line(
    registry: Registry, tmp_path: Path, edit: Any, message: str
) -> None:
    path = _edited(registry, tmp_path / "plan.json", edit)
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2", b"\xff\xfe{}", b"[" * 100_000, b"null", b"[]", b"3"])
def test_a_file_that_is_no_json_object_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match="not a JSON") as caught:
        load_plan(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_or_written_is_refused(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        load_plan(tmp_path)
    with pytest.raises(PlanError, match="cannot be written: No such file"):
        save_plan(_plan(registry), tmp_path / "none" / "plan.json")


def test_comparing_names_what_only_one_plan_has(registry: Registry) -> None:
    whole = saved(_plan(registry))
    part = saved(make_plan(REQUESTS[:2], Selector(registry), model="toy", device=CPU, dtype="bfloat16"))
    assert [str(d) for d in compare_plans(whole, part)] == [
        "toy_scale (decode) in layers 0-2, 5: b.x -> nothing",
        "toy_both (any) in layers 3-4: composed(toy_scale=b.x, toy_shift=b.x) -> nothing",
    ]


def test_references_are_warned_of_once(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "_said", set())
    lacking = registry_of(backend_module("b", Toy("toy_shift", "x")))
    with caplog.at_level(logging.INFO, "k3hal.dispatch"):
        _plan(registry)
        assert caplog.messages == [], "strict says nothing: it has nothing to say"
        _plan(lacking, "warn")
        _plan(lacking, "warn")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "WARNING",
            "on cpu these operators run their reference, which is not written for speed: toy_scale",
        ),
        ("INFO", "no coarse provider on cpu; composed: toy_both of toy_shift, toy_scale"),
    ]


def test_the_table_names_every_entry(registry: Registry) -> None:
    plan = _plan(registry)
    columns = {str(column.header): list(column.cells) for column in plan_table(plan).columns}
    assert columns["operator"] == ["toy_shift", "toy_scale", "toy_scale", "toy_both", "  toy_shift", "  toy_scale"]
    assert columns["layers"] == ["", "0-2, 5", "0-2, 5", "3-4", "", ""]
    assert columns["provider"] == ["b.x", "b.x", "b.x", "composed", "  b.x", "  b.x"]
    assert plan_summary(plan) == "4 entries: 3 b, 1 composed"


@pytest.mark.parametrize(
    ("layers", "text"), [((), ""), ((3,), "layer 3"), ((1, 2), "layers 1-2"), ((5, 0, 1, 9), "layers 0-1, 5, 9")]
)
def test_layer_ranges(layers: tuple[int, ...], text: str) -> None:
    assert layer_ranges(layers) == text
