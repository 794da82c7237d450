"""Flags from layers: the last one wins at its place, spellings are unified, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.errors import UsageError
from k3hal.plan.flags import ALIASES, Layer, argv_of, settings, settle

NAMES = st.sampled_from(
    ["--alpha", "--beta", "--no-alpha", "--gamma_ray", "--gamma-ray", "-tp", "--tensor-parallel-size"]
)
VALUES = st.one_of(st.none(), st.sampled_from(["1", "-1", "-0.5", "x y", "", "a=b", '{"a":-1}', "--looks-like-a-flag"]))


@st.composite
def _tokens(draw: st.DrawFn) -> tuple[str, ...]:
    out: list[str] = []
    for name in draw(st.lists(NAMES, max_size=5)):
        value = draw(VALUES)
        if value is None:
            out.append(name)
        elif value.startswith("--") or draw(st.booleans()):
            out.append(f"{name}={value}")
        else:
            out += [name, value]
    return tuple(out)


@given(st.lists(_tokens(), max_size=4))
def test_settled_flags(layers: list[tuple[str, ...]]) -> None:
    decisions = settle(Layer(str(index), args) for index, args in enumerate(layers))
    argv = argv_of(decisions)
    # What stands is stable, each thing is said once, and every setting of every layer is accounted for.
    assert argv_of(settle([Layer("again", tuple(argv))])) == argv
    assert len({decision.chosen.key for decision in decisions}) == len(decisions)
    given_settings = [setting for index, args in enumerate(layers) for setting in settings(Layer(str(index), args))]
    told = [setting for decision in decisions for setting in (*decision.overrode, decision.chosen)]
    assert sorted(map(repr, told)) == sorted(map(repr, given_settings))
    # The last occurrence of each stands, in the order of these last occurrences.
    last = {setting.key: setting for setting in given_settings}
    order = sorted(last.values(), key=lambda s: max(i for i, other in enumerate(given_settings) if other is s))
    assert [decision.chosen for decision in decisions] == order


@pytest.mark.parametrize(("short", "long"), ALIASES.items())
def test_a_short_alias_is_its_flag(short: str, long: str) -> None:
    (decision,) = settle([Layer("a", (long, "4")), Layer("b", (short, "8"))])
    assert argv_of([decision]) == [long, "8"]
    assert [old.value for old in decision.unified()] == ["4"]


def test_a_value_that_looks_like_a_flag_stays_with_its_own() -> None:
    assert argv_of(settle([Layer("a", ("--x=-a b", "--y", "-1"))])) == ["--x=-a b", "--y=-1"]


def test_what_is_no_flag_is_named() -> None:
    with pytest.raises(UsageError, match="somewhere: 'value' is no flag"):
        settle([Layer("somewhere", ("--x", "1", "value"))])


def test_a_flag_of_several_values_keeps_them() -> None:
    (old, new) = ("--served-model-name", "a", "b"), ("--served_model_name", "c d", "e")
    (decision,) = settle([Layer("model", old), Layer("set", new)])
    assert argv_of([decision]) == ["--served-model-name", "c d", "e"]
    assert [setting.shown for setting in decision.overrode] == ["a b"]
