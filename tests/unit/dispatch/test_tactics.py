"""Tactics: declared with a provider, taken when tuned or named, carried by plans, and bound without a wrapper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3hal.dispatch import Call, provides
from k3hal.dispatch.errors import BackendError, PlanError, UsageError
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.plan import DispatchPlan, OpRequest, make_plan
from k3hal.dispatch.plan_file import load_plan, plan_json, save_plan, saved
from k3hal.dispatch.plan_pin import compare_plans, pin_plan
from k3hal.dispatch.plan_text import plan_table
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.registry import Registry
from k3hal.dispatch.select import Selector
from k3hal.dispatch.tactics import Fingerprint, Rejection, TacticCache, Tuned, device_name, fingerprint, source_hash

from .toys import CPU, Toy, backend_module, call, registry_of

pytestmark = pytest.mark.usefixtures("toys")
REQUESTS = (OpRequest("toy_scale", (0, 1)), OpRequest("toy_both", (2,)))


def wide(x: float, factor: float = 2.0) -> float:
    return x * factor


def narrow(x: float, factor: float = 2.0) -> float:
    return factor * x


def other(x: float, weight: float) -> float:
    return x + weight


@pytest.fixture
def registry() -> Registry:
    made = registry_of(
        backend_module("b", Toy("toy_scale", "x"), Toy("toy_scale", "y", priority=1), Toy("toy_shift", "x"))
    )
    scale = made.providers[0]
    made.providers[0] = replace(scale, tactics={"wide": wide, "narrow": narrow})
    return made


@pytest.fixture(autouse=True)
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys are not read from a file: what stands for their source is one word."""
    monkeypatch.setattr("k3hal.dispatch.tactics.source_hash", lambda provider: "abc")


def _tuned(provider: Provider, tactic: str, /, **changes: Any) -> Tuned:
    made_for = fingerprint(provider, CPU)
    entry = Tuned("toy_scale", "b.x", "bfloat16", "any", {}, made_for, tactic, 0.3, 0.02, 5)
    return replace(entry, **changes)


def _selector(registry: Registry, cache: TacticCache | None, ops: str = "") -> Selector:
    return Selector(registry, parse_overrides(ops, "--ops", registry), "strict", cache)


def test_the_tuned_tactic_is_bound_itself(registry: Registry) -> None:
    cache = TacticCache((_tuned(registry.providers[0], "narrow"),))
    decision = _selector(registry, cache).decide(call("toy_scale"))
    assert decision.function() is narrow
    assert (decision.provider, decision.tactic) == ("b.x", "narrow")
    assert decision.tactic_source == "tuned: 30.0 % faster than default, noise 2.0 %, 5 cases"
    assert _selector(registry, None).decide(call("toy_scale")).function() is registry.providers[0].fn


@pytest.mark.parametrize(
    ("change", "source"),
    [
        ({"dims": {"size": 3}}, "not tuned for these dims"),
        ({"dtype": "float32"}, "not tuned for these dims"),
        ({"phase": "decode"}, "not tuned for these dims"),
        ({"provider": "b.y"}, "not tuned for these dims"),
        ({"made_for": Fingerprint("another machine", "abc", {})}, "not tuned for these dims"),
        ({"made_for": Fingerprint(device_name(CPU), "abd", {})}, "no longer tuned: the provider's source changed"),
        ({"made_for": Fingerprint(device_name(CPU), "abc", {"torch": "1"})}, "no longer tuned: torch changed"),
        ({"tactic": "gone"}, "gone, which was tuned, is not offered for these dims"),
        ({"tactic": DEFAULT}, "tuned: no other is faster, 5 cases"),
    ],
)
def test_what_was_found_for_something_else_does_not_count(
    registry: Registry, change: dict[str, Any], source: str
) -> None:
    cache = TacticCache((_tuned(registry.providers[0], "narrow", **change),))
    decision = _selector(registry, cache).decide(call("toy_scale"))
    assert (decision.tactic, decision.tactic_source) == (DEFAULT, source)
    assert decision.function() is registry.providers[0].fn


def test_a_rejected_tactic_is_not_taken_and_a_machine_that_is_not_here_is_not_tuned(registry: Registry) -> None:
    provider = registry.providers[0]
    refused = Rejection("toy_scale", "b.x", "narrow", "bfloat16", fingerprint(provider, CPU), "Fail", "wrong")
    both = TacticCache((_tuned(provider, "narrow"),), (refused,))
    assert both.choose(provider, call("toy_scale")).source == "narrow was rejected: wrong"
    assert TacticCache((_tuned(provider, "narrow"),)).with_rejection(refused).tuned == ()
    elsewhere = call("toy_scale", replace(CPU, present=False))
    assert TacticCache().choose(provider, elsewhere).source == "not tuned: the machine is not here"


def test_an_override_may_name_a_tactic(registry: Registry) -> None:
    decision = _selector(registry, TacticCache(), "toy_scale=x:wide").decide(call("toy_scale"))
    assert decision.function() is wide
    assert decision.tactic_source == "--ops: toy_scale=x:wide"
    with pytest.raises(UsageError, match=r"b\.x has no tactic 'wild' \(did you mean 'wide'\?"):
        _selector(registry, None, "toy_scale=x:wild").decide(call("toy_scale"))
    passed_over = _selector(registry, None, "toy_*=b:wide")
    assert passed_over.decide(call("toy_shift")).policy == "priority 50"
    assert passed_over.decide(call("toy_both")).parts["toy_scale"].tactic == "wide"
    for malformed in ("toy_scale=x:", "toy_scale=reference:wide", "toy_scale=composed:wide"):
        with pytest.raises(UsageError, match="names no tactic of a provider"):
            parse_overrides(malformed, "--ops", registry)


def _plan(registry: Registry, cache: TacticCache | None = None) -> DispatchPlan:
    return make_plan(REQUESTS, _selector(registry, cache), model="toy", device=CPU, dtype="bfloat16")


def test_plans_carry_pin_and_compare_tactics(registry: Registry, tmp_path: Path) -> None:
    tuned = _plan(registry, TacticCache((_tuned(registry.providers[0], "narrow"),)))
    entries = plan_json(tuned)["entries"]
    assert (entries[0]["tactic"], entries[1]["tactic"]) == ("narrow", None)
    assert {op: part["tactic"] for op, part in entries[1]["parts"].items()} == {
        "toy_shift": None,
        "toy_scale": "narrow",
    }
    assert entries[0]["reasons"][1] == "tactic narrow: tuned: 30.0 % faster than default, noise 2.0 %, 5 cases"
    save_plan(tuned, tmp_path / "plan.json")
    pinned = pin_plan(load_plan(tmp_path / "plan.json"), REQUESTS, registry, model="toy", device=CPU, dtype="bfloat16")
    assert pinned.bind().fn("toy_scale", 0) is narrow
    assert compare_plans(saved(tuned), saved(pinned)) == ()
    first, second = compare_plans(saved(_plan(registry)), saved(tuned))
    assert str(first) == "toy_scale (any) in layers 0-1: b.x -> b.x:narrow"
    assert "toy_scale=b.x:narrow" in str(second)
    cells = [list(column.cells) for column in plan_table(tuned).columns]
    assert cells[3][0] == "b.x:narrow"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tactic": "wild"}, r"b\.x has no tactic 'wild' here"),
        ({"tactic": 3}, "'tactic' is neither a name nor null"),
        ({"tactic": "wide", "provider": "reference"}, "reference has no tactics, the plan gives 'wide'"),
    ],
)
def test_a_plan_with_a_tactic_that_is_not_there_is_refused(
    registry: Registry, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = plan_json(_plan(registry))
    data["entries"][0].update(changes)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        pin_plan(load_plan(tmp_path / "plan.json"), REQUESTS, registry, model="toy", device=CPU, dtype="bfloat16")


def test_a_plan_from_before_tactics_is_the_default(registry: Registry, tmp_path: Path) -> None:
    data = plan_json(_plan(registry))
    for entry in data["entries"]:
        del entry["tactic"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert compare_plans(load_plan(tmp_path / "plan.json"), saved(_plan(registry))) == ()


def test_broken_tactics_are_the_backends_fault(registry: Registry) -> None:
    def crash(_: Call) -> dict[str, Any]:
        raise RuntimeError("no device")

    for tactics, message in (
        (lambda _: {"wide": other}, "tactic wide, takes"),
        (crash, "crashed when asked for its tactics"),
    ):
        registry.providers[0] = replace(registry.providers[0], tactics=tactics)
        with pytest.raises(BackendError, match=message):
            _selector(registry, None, "toy_scale=x:wide").decide(call("toy_scale"))
    module = backend_module("c")
    vars(module)["odd"] = made = provides("toy_scale", name="odd", tactics={"bad": other})(wide)
    made.__module__, before = module.__name__, made.__module__
    try:
        with pytest.raises(BackendError, match=r"provider c\.odd of toy_scale, tactic bad, takes"):
            registry_of(module)
    finally:
        made.__module__ = before
        delattr(made, "__k3hal_providers__")
    for name in ("a-b", DEFAULT, "reference"):
        with pytest.raises(ValueError, match="tactic name"):
            provides("toy_scale", name="fine", tactics={name: wide})


def test_the_source_hash_follows_the_backends_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from k3hal.dispatch import tactics as tactics_module

    package = tmp_path / "hashed_backend"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fast.py").write_text("def fast(x, factor=2.0):\n    return x * factor\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fn = importlib.import_module("hashed_backend.fast").fast
    provider = Provider("toy_scale", "fast", fn)

    def now() -> str:
        tactics_module._hash_of.cache_clear()
        return source_hash(provider)

    first = now()
    assert first == now()
    (package / "kernel.cu").write_text("// a kernel")
    second = now()
    assert second not in ("", first)
    fn.__module__ = "made_in_memory"
    assert now() == ""
