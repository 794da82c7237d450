"""What selection promises, whatever providers there are and in whatever order they were registered."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.dispatch import No, Yes
from k3hal.dispatch.errors import BackendError, DispatchError
from k3hal.dispatch.overrides import Override
from k3hal.dispatch.registry import Registry
from k3hal.dispatch.select import REFERENCE, Selector

from .toys import NEVER, Toy, backend_module, call, registry_of

pytestmark = pytest.mark.usefixtures("toys")


@dataclass(frozen=True)
class Spec:
    """A backend of the state space: its priority, whether it is chosen unasked, and its providers of toy_scale."""

    name: str
    priority: int
    auto: bool
    providers: tuple[tuple[str, int | None, bool], ...]


# Backend and provider names overlap, so that an override's word can mean either.
_NAMES = st.sampled_from(["one", "two", "three"])
_PRIORITIES = st.integers(0, 3)
_PROVIDERS = st.lists(
    st.tuples(_NAMES, st.none() | _PRIORITIES, st.booleans()), max_size=3, unique_by=lambda p: p[0]
).map(tuple)
_BACKENDS = st.lists(
    st.builds(Spec, _NAMES, _PRIORITIES, st.booleans(), _PROVIDERS), max_size=3, unique_by=lambda spec: spec.name
)


def _registry(specs: list[Spec]) -> Registry:
    return registry_of(
        *(
            backend_module(
                spec.name,
                *(Toy("toy_scale", n, Yes() if yes else NEVER, priority=p) for n, p, yes in spec.providers),
                priority=spec.priority,
                auto=spec.auto,
            )
            for spec in specs
        )
    )


def _able(specs: list[Spec], *, auto_only: bool) -> dict[str, int]:
    """Id -> priority of every provider that says Yes."""
    return {
        f"{spec.name}.{name}": spec.priority if own is None else own
        for spec in specs
        for name, own, yes in spec.providers
        if yes and (spec.auto or not auto_only)
    }


@given(_BACKENDS)
def test_the_most_preferred_yes_is_chosen_and_never_a_no(specs: list[Spec]) -> None:
    able = _able(specs, auto_only=True)
    selector = Selector(_registry(specs))
    if not able:
        with pytest.raises(DispatchError, match="only the reference is left"):
            selector.decide(call("toy_scale"))
        return
    best = min(able, key=lambda provider: (-able[provider], provider))
    assert selector.decide(call("toy_scale")).provider == best


@given(_BACKENDS, st.randoms(use_true_random=False))
def test_the_order_of_registration_does_not_matter(specs: list[Spec], shuffle: random.Random) -> None:
    mixed = [
        Spec(s.name, s.priority, s.auto, tuple(shuffle.sample(s.providers, len(s.providers))))
        for s in shuffle.sample(specs, len(specs))
    ]
    first, second = (Selector(_registry(x), fallback="warn").decide(call("toy_scale")) for x in (specs, mixed))
    assert (first.provider, first.trace) == (second.provider, second.trace)


@given(_BACKENDS)
def test_warn_falls_to_the_reference_only_when_nothing_says_yes(specs: list[Spec]) -> None:
    decision = Selector(_registry(specs), fallback="warn").decide(call("toy_scale"))
    assert (decision.provider == REFERENCE) == (not _able(specs, auto_only=True))
    assert decision.reference == (decision.provider == REFERENCE)


@given(_BACKENDS, st.sampled_from(["one", "two", "three", "one.one", "two.one", "one.three"]), st.booleans())
def test_an_override_is_obeyed_refused_or_without_match_but_never_bent(
    specs: list[Spec], word: str, exact: bool
) -> None:
    registry = _registry(specs)
    every = {f"{s.name}.{n}": (n, s.name) for s in specs for n, _, _ in s.providers}
    meant = (
        {word} & set(every)
        or {i for i, (name, _) in every.items() if name == word}
        or {i for i, (_, backend) in every.items() if backend == word}
    )
    able = meant & set(_able(specs, auto_only=False))
    selector = Selector(registry, (Override("toy_scale" if exact else "toy_*", word, "test"),), "warn")
    if able:
        decision = selector.decide(call("toy_scale"))
        assert decision.provider in able
        assert decision.policy.startswith("test: ")
    elif meant or exact:
        with pytest.raises(DispatchError, match=r"cannot run|names no provider"):
            selector.decide(call("toy_scale"))
    else:
        assert selector.decide(call("toy_scale")) == Selector(registry, (), "warn").decide(call("toy_scale"))


@given(_BACKENDS, st.lists(st.sampled_from(["reference", "one", "two"]), min_size=1, max_size=4))
def test_strict_yields_a_reference_only_where_the_last_override_asks(specs: list[Spec], words: list[str]) -> None:
    overrides = tuple(Override("toy_scale", word, "test") for word in words)
    try:
        decision = Selector(_registry(specs), overrides).decide(call("toy_scale"))
    except DispatchError:
        assert words[-1] != REFERENCE
        return
    assert (decision.provider == REFERENCE) == (words[-1] == REFERENCE)


def test_a_later_override_wins() -> None:
    registry = registry_of(backend_module("b", Toy("toy_scale", "fast"), Toy("toy_scale", "safe")))
    both = (Override("toy_*", "fast", "K3HAL_OPS"), Override("toy_scale", "safe", "--ops"))
    assert Selector(registry, both).decide(call("toy_scale")).provider == "b.safe"
    assert Selector(registry, both[::-1]).decide(call("toy_scale")).provider == "b.fast"


def test_a_crash_in_supports_is_an_error_and_never_a_no() -> None:
    registry = registry_of(
        backend_module("bad", Toy("toy_scale", "x", KeyError("heads")), priority=99),
        backend_module("good", Toy("toy_scale", "x")),
    )
    with pytest.raises(BackendError, match=r"bad\.x crashed in supports\(\) for toy_scale.*heads"):
        Selector(registry, fallback="warn").decide(call("toy_scale"))


@pytest.mark.parametrize("answer", [True, False, "yes", 1])
def test_an_answer_that_is_neither_yes_nor_no_is_an_error(answer: object) -> None:
    registry = registry_of(backend_module("b", Toy("toy_scale", "x", answer)))
    with pytest.raises(BackendError, match="neither Yes nor No"):
        Selector(registry, fallback="warn").decide(call("toy_scale"))


def test_a_refusal_quotes_every_reason() -> None:
    registry = registry_of(backend_module("b", Toy("toy_scale", "x", No("too narrow", "too short"))))
    with pytest.raises(DispatchError) as caught:
        Selector(registry, (Override("*", "b.x", "--ops"),)).decide(call("toy_scale"))
    assert str(caught.value) == (
        "toy_scale (any, bfloat16) on cpu: --ops: *=b.x cannot run (b.x: too narrow, too short)"
    )


def test_consider_asks_every_provider_also_those_chosen_only_by_name() -> None:
    registry = registry_of(
        backend_module("b", Toy("toy_scale", "x"), Toy("toy_scale", "y", NEVER)),
        backend_module("n", Toy("toy_scale", "z"), auto=False, priority=0),
    )
    lines = Selector(registry).consider(call("toy_scale"))
    assert [(line.provider, line.accepted) for line in lines] == [("b.x", True), ("b.y", False), ("n.z", True)]
