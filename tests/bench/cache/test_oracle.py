"""The bound holds against every cache there could be, and the reference is a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.bench.cache.mooncake import read_trace
from k3hal.bench.cache.oracle import foresee
from k3hal.bench.cache.units import UnitIndex, UnitSequences

UNIT = 8


NO_OUTPUT = np.zeros(0, np.int64)


def sequences(prompts: Sequence[Sequence[int]]) -> UnitSequences:
    """Prompts given by the numbers of their units, each followed by one token of its own, and no output."""
    tokens = [
        np.concatenate([*(np.arange(UNIT) + 1000 * unit for unit in prompt), np.array([10**6 + number])])
        for number, prompt in enumerate(prompts)
    ]
    return UnitSequences.of_tokens([(ids, NO_OUTPUT) for ids in tokens], UNIT)


def best_of_all(prompts: Sequence[Sequence[int]], unit_bytes: int, snapshot_bytes: int, budget: int) -> int:
    """Hit units of the best cache: tries everything that could be kept after every request."""
    reached: dict[frozenset[tuple[str, tuple[int, ...]]], int] = {frozenset(): 0}
    for prompt in prompts:
        prefixes = [tuple(prompt[:depth]) for depth in range(1, len(prompt) + 1)]
        following: dict[frozenset[tuple[str, tuple[int, ...]]], int] = {}
        for kept, hits in reached.items():
            hit = 0
            for prefix in prefixes:
                if ("kv", prefix) not in kept:
                    break
                if ("state", prefix) in kept:
                    hit = len(prefix)
            things = sorted(kept | {(kind, prefix) for kind in ("kv", "state") for prefix in prefixes})
            for count in range(len(things) + 1):
                for chosen in combinations(things, count):
                    size = sum(unit_bytes if kind == "kv" else snapshot_bytes for kind, _ in chosen)
                    if size <= budget:
                        key = frozenset(chosen)
                        following[key] = max(following.get(key, 0), hits + hit)
        reached = following
    return max(reached.values())


prompt_lists = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=2).map(lambda tail: [0, *tail][:3]), min_size=2, max_size=4
)


@settings(max_examples=25, deadline=None)
@given(prompt_lists, st.integers(1, 3), st.integers(1, 4), st.integers(0, 8))
def test_no_cache_beats_the_bound(prompts: list[list[int]], unit_bytes: int, snapshot_bytes: int, budget: int) -> None:
    seen = sequences(prompts)
    known = foresee(seen, unit_bytes=unit_bytes, snapshot_bytes=snapshot_bytes, budget=budget)
    best = best_of_all(prompts, unit_bytes, snapshot_bytes, budget) * UNIT / seen.tokens
    assert known.reference <= best + 1e-9, "what the reference keeps could be kept"
    assert best <= known.bound + 1e-9
    assert known.bound <= known.ceiling + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30), st.integers(0, 60))
def test_the_three_figures_are_in_order(prompts: list[list[int]], budget: int) -> None:
    seen = sequences(prompts)
    known = foresee(seen, unit_bytes=1, snapshot_bytes=4, budget=budget)
    assert 0 <= known.reference <= known.bound + 1e-9 <= known.ceiling + 2e-9
    more = foresee(seen, unit_bytes=1, snapshot_bytes=4, budget=10**6)
    assert more.reference == pytest.approx(more.ceiling) == pytest.approx(more.bound)


def test_what_was_decoded_counts_to_its_last_computed_token() -> None:
    prompt, output, more = np.arange(20), np.arange(500, 510), np.arange(900, 905)
    again = np.concatenate((prompt, output, more))
    seen = UnitSequences.of_tokens([(prompt, output), (again, NO_OUTPUT)], UNIT)
    known = foresee(seen, unit_bytes=1, snapshot_bytes=1, budget=100)
    assert known.reference == known.bound == known.ceiling == pytest.approx(29 / (20 + 35))


def test_the_end_of_a_sequence_is_found_by_what_begins_with_it() -> None:
    index = UnitIndex(UNIT)
    short, longer, other = np.arange(11), np.arange(20), np.arange(11) + 1
    assert index.note_end(short, index.of(short)) is not None
    found = index.ends_in(longer, index.of(longer))
    assert [(end.depth, end.tokens) for end in found] == [(1, 11)]
    assert index.ends_in(other, index.of(other)) == []
    assert index.note_end(np.arange(16), index.of(np.arange(16))) is None


def test_the_figures_of_the_public_trace(shared_data: Callable[[str], Path]) -> None:
    """Those that were published for this rule, on its own grid of 512 tokens."""
    seen = UnitSequences.of(read_trace(shared_data("synthetic_trace.jsonl")), 512)
    kv, state = 512 * 576 * 24, 56_171_520
    known = foresee(seen, unit_bytes=kv, snapshot_bytes=state, budget=1000 * 21_233_664)
    assert known.reference == pytest.approx(0.4199, abs=2e-4)
    assert known.ceiling == pytest.approx(0.6504, abs=2e-4)
    assert known.reference < known.bound < 1.08 * known.reference
