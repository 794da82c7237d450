"""Composed operators: decided by their parts, and laid out by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3hal.dispatch import Needs
from k3hal.dispatch.errors import DispatchError
from k3hal.dispatch.overrides import Override
from k3hal.dispatch.plan_file import SavedEntry, SavedPlan, choice_of
from k3hal.dispatch.plan_pin import pinned_decision
from k3hal.dispatch.select import COMPOSED, REFERENCE, FallbackPolicy, Selector

from .toys import NEVER, Toy, backend_module, call, registry_of

pytestmark = pytest.mark.usefixtures("toys")


def _negated(weight: float) -> Mapping[str, Any]:
    return {"weight": -weight}


def _subtract(x: float, weight: float) -> float:
    return x - weight


SHIFT, SCALE = Toy("toy_shift", "x"), Toy("toy_scale", "x")
# A provider whose layout of the weight is its negative: right only if `prepare` ran for it, once.
NEGATING = Toy("toy_shift", "x", fn=_subtract, prepare=_negated)


def _decide(
    op: str, *toys: Toy, overrides: tuple[Override, ...] = (), fallback: FallbackPolicy = "strict", **dims: Any
):
    return Selector(registry_of(backend_module("b", *toys)), overrides, fallback).decide(call(op, **dims))


def test_a_missing_coarse_provider_is_composed_from_finer_ones() -> None:
    decision = _decide("toy_both", SHIFT, SCALE)
    assert decision.provider == COMPOSED
    assert {name: part.provider for name, part in decision.parts.items()} == {"toy_shift": "b.x", "toy_scale": "b.x"}
    assert decision.function()(1.0, weight=2.0) == 6.0
    assert not decision.reference


def test_a_coarse_provider_is_preferred_to_its_parts() -> None:
    assert _decide("toy_both", SHIFT, SCALE, Toy("toy_both", "x")).provider == "b.x"
    assert _decide("toy_both", SHIFT, SCALE, Toy("toy_both", "x", NEVER)).provider == COMPOSED


def test_strict_refuses_a_composition_with_a_reference_in_it_and_names_the_part() -> None:
    with pytest.raises(DispatchError, match=r"cannot be composed: toy_scale .* only the reference is left"):
        _decide("toy_both", SHIFT)


def test_warn_composes_with_some_references_but_prefers_the_coarse_one_to_nothing_else() -> None:
    decision = _decide("toy_both", SHIFT, fallback="warn")
    assert (decision.provider, decision.reference) == (COMPOSED, True)
    assert decision.parts["toy_scale"].provider == REFERENCE
    alone = _decide("toy_both", fallback="warn")
    assert (alone.provider, alone.parts) == (REFERENCE, {})


def test_overrides_reach_the_parts() -> None:
    asked = (Override("toy_scale", REFERENCE, "--ops"), Override("toy_shift", REFERENCE, "--ops"))
    decision = _decide("toy_both", overrides=asked)
    assert decision.provider == COMPOSED
    assert decision.function()(1.0, 2.0, factor=3.0) == 9.0


def test_composed_can_be_asked_for_by_name() -> None:
    asked = (Override("toy_*", COMPOSED, "--ops"),)
    assert _decide("toy_both", SHIFT, SCALE, Toy("toy_both", "x"), overrides=asked).provider == COMPOSED
    with pytest.raises(DispatchError, match="names no provider of toy_scale"):
        _decide("toy_scale", SCALE, overrides=(Override("toy_scale", COMPOSED, "--ops"),))


def test_a_part_lays_out_the_weights_that_are_its_own() -> None:
    decision = _decide("toy_both", NEGATING, SCALE)
    assert decision.parts["toy_shift"].provider == "b.x"
    assert decision.function()(1.0, **decision.prepare(weight=2.0)) == 6.0


def test_a_weight_two_parts_take_is_laid_out_for_neither() -> None:
    """toy_twice hands its weight to both kinds: a layout for the one would be wrong for the other."""
    with pytest.raises(DispatchError, match="lays out weights at load"):
        _decide("toy_twice", NEGATING, Toy("toy_other", "x"))
    decision = _decide("toy_twice", NEGATING, Toy("toy_other", "x"), kind="shift", size=3)
    assert dict(decision.parts["toy_shift"].call.dims) == {"width": 3}
    assert list(decision.parts) == ["toy_shift"]
    assert decision.function()(1.0, **decision.prepare(weight=2.0)) == 3.0


NARROW = Needs(dtypes=("bfloat16",))
WIDE_CASES = [
    ("all_take_it", (SHIFT, SCALE), "strict", "float32"),
    ("one_does_not", (Toy("toy_shift", "x", needs=NARROW), SCALE), "strict", "bfloat16"),
    ("one_is_a_reference_anyway", (SHIFT,), "warn", "float32"),
    ("that_would_be_a_reference_more", (Toy("toy_shift", "x", needs=NARROW),), "warn", "bfloat16"),
]


@pytest.mark.parametrize(
    ("toys_there", "fallback", "dtype"), [c[1:] for c in WIDE_CASES], ids=[c[0] for c in WIDE_CASES]
)
def test_parts_are_float32_calls_where_all_can_be(
    toys_there: tuple[Toy, ...], fallback: FallbackPolicy, dtype: str
) -> None:
    decision = _decide("toy_wide", *toys_there, fallback=fallback)
    assert {part.call.dtype for part in decision.parts.values()} == {dtype}
    assert ("toy_shift=b.x in float32" in decision.trace[-1].reasons[0]) is (dtype == "float32")
    entry = SavedEntry("toy_wide", (), "any", choice_of(decision))
    plan = SavedPlan("plan.json", "cpu", "toy", (entry,))
    pinned = pinned_decision(plan, decision.call, registry_of(backend_module("b", *toys_there)))
    assert {name: part.call for name, part in pinned.parts.items()} == {n: p.call for n, p in decision.parts.items()}


def test_a_composition_is_refused_by_what_its_parts_say_of_the_call_s_own_dtype() -> None:
    with pytest.raises(DispatchError, match=r"toy_wide .*cannot be composed: toy_scale \(any, bfloat16\)"):
        _decide("toy_wide", SHIFT)


def test_tensors_of_the_call_s_dtype_are_widened_and_no_others() -> None:
    seen: list[torch.dtype] = []

    def shift(x: Any, weight: Any) -> Any:
        seen.extend((x.dtype, weight.dtype))
        return x + weight

    decision = _decide("toy_wide", SHIFT, SCALE)
    fn = decision.fitted("toy_shift", shift)
    out = fn(torch.ones(2, dtype=torch.bfloat16), weight=torch.ones(2, dtype=torch.float64))
    assert seen == [torch.float32, torch.float64] and out.dtype is torch.float64
    assert replace(decision, call=replace(decision.call, dtype="float32")).fitted("toy_shift", shift) is shift
