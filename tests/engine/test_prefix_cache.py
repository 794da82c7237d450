"""What the prefix cache finds: resends, turns, siblings, edits; whose it finds; and how it says why it did not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.engine.cache.geometry import CacheGeometry, k3_geometry
from k3hal.engine.cache.interface import NEVER
from k3hal.engine.cache.keys import NO_CONTEXT, PrefixContext
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.policy import Kind, PromptEnd, PromptFacts, Stop
from k3hal.engine.cache.prefix import PrefixCache

from .cache_audit import audit

SMALL = CacheGeometry(page_tokens=128, page_bytes=1000, slot_bytes=2500)
BUDGET = 2048


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make(policy: str = "cost", num_runs: int = 2000, *, unit: int = 128, rows: int = 4) -> PrefixCache:
    return PrefixCache(
        SMALL, num_runs, rows, 1 << 17, policy=make_policy(policy), match_unit=unit, seed=b"seed", clock=Clock()
    )


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count)


def prefill(cache: PrefixCache, row: int, prompt: np.ndarray, context: PrefixContext = NO_CONTEXT) -> int:
    """Admit a prompt and compute it in chunks; how much was cached."""
    cached = cache.admit(row, prompt, context=context)
    assert cached is not None
    position = cached
    while position < prompt.size:
        position = cache.chunk_end(row, position, min(position + BUDGET, prompt.size))
        cache.reach(row, prompt[:position])
        cache.take_copies()
    return cached


def serve(
    cache: PrefixCache, prompt: np.ndarray, output: np.ndarray | None = None, context: PrefixContext = NO_CONTEXT
) -> int:
    """One request from beginning to end, alone; how much of its prompt was cached."""
    cached = prefill(cache, 0, prompt, context)
    whole = prompt if output is None else np.concatenate((prompt, output[:-1]))
    for position in range(prompt.size + 1, whole.size + 1):
        assert cache.extend(0, position)
        if position >= cache.next_stop[0]:
            cache.reach(0, whole[:position])
    cache.release(0, whole)
    return cached


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 1000, 2047, 2048, 2049, 4096, 5000])
@pytest.mark.parametrize("policy", ["cost", "prompt", "interval:512"])
def test_a_resend_of_any_length_hits_all_but_its_last_unit(policy: str, length: int) -> None:
    cache, prompt = make(policy), tokens(length, length)
    assert serve(cache, prompt, tokens(0, 9)) == 0
    assert serve(cache, prompt, tokens(1, 9)) >= (length - 1) // 128 * 128


@pytest.mark.parametrize("policy", ["cost", "second-hit"])
def test_the_next_turn_starts_from_the_last_decoded_token(policy: str) -> None:
    cache, history = make(policy), tokens(1, 700)
    known = 0
    for turn in range(6):
        said = tokens(100 + turn, 37 + 50 * turn)
        assert serve(cache, history, said) == known
        known = history.size + said.size - 1
        history = join(history, said, tokens(200 + turn, 61))


@pytest.mark.parametrize("shared", [1000, 1600, 4000])
def test_siblings_that_part_at_a_message_end_hit_from_the_second_on(shared: int) -> None:
    cache, prefix = make(), tokens(2, shared)
    hits = []
    for child in range(4):
        prompt = join(prefix, tokens(10 + child, 700))
        hits.append(serve(cache, prompt, tokens(20 + child, 20), PrefixContext(boundaries=(shared,))))
    assert hits == [0, shared, shared, shared]


@pytest.mark.parametrize("shared", [1000, 1600, 4000])
@pytest.mark.parametrize("policy", ["cost", "second-hit"])
def test_siblings_that_part_anywhere_hit_from_the_third_on(policy: str, shared: int) -> None:
    cache, prefix = make(policy), tokens(3, shared)
    hits = [serve(cache, join(prefix, tokens(10 + i, 700)), tokens(20 + i, 20)) for i in range(4)]
    assert min(hits[2:]) >= shared // 128 * 128


def test_an_interval_policy_keeps_states_while_decoding() -> None:
    cache, prompt, said = make("interval:256"), tokens(4, 300), tokens(5, 1000)
    serve(cache, prompt, said)
    assert serve(cache, join(prompt, said[:800], tokens(6, 50))) == 1024


def test_the_policy_none_keeps_nothing() -> None:
    cache, prompt = make("none"), tokens(7, 1000)
    assert [serve(cache, prompt, tokens(8, 30)) for _ in range(3)] == [0, 0, 0]
    assert (cache.usage, cache.cached_usage) == (0.0, 0.0)


@pytest.mark.parametrize(
    "other",
    [
        PrefixContext(salt="b"),
        PrefixContext(adapter="a"),
        PrefixContext(salt="aa"),
        PrefixContext(salt="a", media=((5, b"x"),)),
        PrefixContext(private=True),
    ],
)
def test_another_tenant_adapter_or_image_shares_nothing(other: PrefixContext) -> None:
    cache, prompt = make(), tokens(9, 1000)
    own = PrefixContext(salt="a")
    serve(cache, prompt, context=own)
    assert cache.lookup(prompt, other).cached == 0
    assert serve(cache, prompt, context=other) == 0
    assert cache.lookup(prompt, own).cached >= 896


def test_images_separate_only_what_comes_after_them() -> None:
    cache, prompt = make("interval:128"), tokens(10, 1000)
    serve(cache, prompt, context=PrefixContext(media=((600, b"cat"),)))
    assert cache.lookup(prompt, PrefixContext(media=((600, b"cat"),))).cached == 896
    assert cache.lookup(prompt, PrefixContext(media=((600, b"dog"),))).cached == 512
    assert cache.lookup(prompt, PrefixContext(media=((599, b"cat"),))).cached == 512


def test_a_failed_sequence_leaves_nothing_and_takes_its_origin_along() -> None:
    cache, prompt = make(), tokens(11, 900)
    serve(cache, prompt)
    assert prefill(cache, 0, join(prompt, tokens(12, 300))) > 0
    cache.release(0, None)
    assert cache.lookup(join(prompt, tokens(12, 300))).cached == 0
    assert serve(cache, prompt) == 0


def test_a_prompt_still_served_is_not_the_first_to_go() -> None:
    """A's prompt stays while A decodes and others come and go, as long as any colder entry exists."""
    cache = make(num_runs=40, rows=2)
    for seed in range(20, 25):
        serve(cache, tokens(seed, 400))
    prompt = tokens(30, 600)
    prefill(cache, 1, prompt)
    for seed in range(40, 43):
        serve(cache, tokens(seed, 400))
    assert cache.lookup(prompt).cached == 512


def test_admission_takes_all_or_nothing() -> None:
    cache = make(num_runs=12, rows=3)
    prefill(cache, 0, tokens(1, 2000))
    before = (cache.pool.num_free_pages, cache.page_table.copy(), cache.num_pages.copy(), cache.slots.copy())
    assert cache.admit(1, tokens(2, 2000)) is None
    assert cache.admit(1, tokens(2, 1400), reserve_pages=3) is None
    after = (cache.pool.num_free_pages, cache.page_table, cache.num_pages, cache.slots)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert cache.admit(1, tokens(2, 1400)) == 0
    assert not cache.extend(1, 3000)


def test_what_waits_is_evicted_for_what_runs_and_never_the_other_way() -> None:
    cache = make("prompt", num_runs=30, rows=2)
    prefill(cache, 0, tokens(1, 1500))
    held = cache.page_table[0, : cache.num_pages[0]].copy()
    for seed in range(2, 30):
        prefill(cache, 1, tokens(seed, 1700))
        assert not np.intersect1d(held, cache.page_table[1, : cache.num_pages[1]]).size
        cache.release(1, tokens(seed, 1700))
    assert cache.stats.snapshots_evicted > 10


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=12),
    unit=st.sampled_from([8, 16, 24]),
    policy=st.sampled_from(["cost", "prompt", "second-hit", "interval:16", "none"]),
    num_runs=st.integers(14, 40),
)
def test_labels_account_for_every_token(
    lengths: list[tuple[int, int, int]], unit: int, policy: str, num_runs: int
) -> None:
    geometry = CacheGeometry(page_tokens=16, page_bytes=100, slot_bytes=250)
    cache = PrefixCache(
        geometry, num_runs, 1, 200, policy=make_policy(policy), match_unit=unit, seed=b"", clock=Clock()
    )
    total = 0
    for family, shared, own in lengths:
        prompt = join(tokens(family, 90)[:shared], tokens(1000 + own, own))
        found = cache.lookup(prompt)
        assert found.cached + sum(found.labels.values()) == prompt.size
        assert min(found.labels.values()) >= 0
        assert serve(cache, prompt, tokens(own, 5)) == found.cached
        total += prompt.size
    stats = cache.stats
    assert stats.prompt_tokens == total == stats.cached_tokens + sum(stats.labels.values())


def test_labels_say_why() -> None:
    cache, prompt = make("prompt", num_runs=12), tokens(1, 1000)
    assert cache.lookup(prompt).labels["cold"] == 1000
    serve(cache, prompt)
    again = cache.lookup(prompt)
    assert (again.cached, again.labels["alignment"], again.labels["cap"]) == (896, 103, 1)
    aligned = cache.lookup(prompt[:896])
    assert (aligned.cached, aligned.labels["no_state"], aligned.labels["cap"]) == (0, 768, 128)
    edited = join(prompt[:500], tokens(2, 400))
    assert cache.lookup(edited).labels == {
        "cold": 516, "evicted_kv": 0, "no_state": 384, "alignment": 0, "cap": 0, "draft": 0,
    }  # fmt: skip
    for seed in range(3, 9):
        serve(cache, tokens(seed, 1500))
    assert cache.lookup(prompt).labels["evicted_kv"] == 896


def test_preempted_prompts_are_counted_apart() -> None:
    cache, prompt = make(), tokens(1, 700)
    prefill(cache, 0, prompt)
    cache.release(0, prompt, preempted=True)
    assert cache.admit(0, join(prompt, tokens(2, 1)), resumed=True) == 700
    stats = cache.stats
    assert (stats.requests, stats.cached_tokens, stats.prompt_tokens) == (1, 0, 700)
    assert (stats.resumed_requests, stats.resumed_tokens, stats.resumed_cached_tokens) == (1, 701, 700)


def test_books_agree_under_eviction_and_moves_with_stops_inside_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message end and the rest of its unit lie in one page, after a node that ends where that page begins."""

    class EveryEnd(PromptEnd):
        def stops(self, facts: PromptFacts) -> list[Stop]:
            return [*super().stops(facts), *(Stop(at, Kind.BOUNDARY) for at in facts.boundaries)]

    cache, rng = make(num_runs=40), np.random.default_rng(0)
    cache.use(EveryEnd())
    moves: list[int] = []
    tree = cache.index.tree
    rename = tree.rename

    def counted(old: int, new: int) -> None:
        moves.append(1 + len(tree.sharers.get(old, ())))
        rename(old, new)

    monkeypatch.setattr(tree, "rename", counted)
    for number in range(120):
        length = int(rng.integers(300, 1500))
        ends = tuple(sorted(rng.integers(1, length, 3).tolist()))
        prompt = tokens(number % 40, 1500)[:length]
        serve(cache, prompt, tokens(100 + number, 30), PrefixContext(boundaries=ends))
        audit(cache)
    assert len(moves) > 50
    assert max(moves) >= 3


def test_a_policy_taken_over_mid_way_gives_up_what_the_other_kept() -> None:
    cache = make("interval:128", num_runs=30)
    serve(cache, tokens(1, 1500))
    cache.use(make_policy("cost"))
    for seed in range(2, 12):
        serve(cache, tokens(seed, 1500))
    assert cache.lookup(join(tokens(11, 1500), tokens(0, 10))).cached == 1500
    cache.use(make_policy("none"))
    assert serve(cache, tokens(50, 1500)) == 0
    assert cache.next_stop[0] == NEVER


@pytest.mark.parametrize("tp", [1, 8, 16])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
def test_a_snapshot_of_k3_wastes_at_most_one_percent(tp: int, kv: str) -> None:
    geometry = k3_geometry(tp, "fp8" if kv == "fp8" else "bf16")
    assert geometry.slot_waste <= 0.01


def test_sizes_of_k3_are_those_of_the_specification() -> None:
    geometry = k3_geometry(8)
    assert (geometry.slot_bytes, geometry.page_bytes, geometry.pages_per_slot) == (56_171_520, 1_769_472, 32)
    assert k3_geometry(1).slot_bytes == 449_372_160
