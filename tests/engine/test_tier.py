"""Prefixes that left the device's memory come back from the external tier, and nothing but them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from k3hal.sampling_params import SamplingParams

from .cache_audit import audit
from .harness import Harness, greedy_by_hand

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def prompt_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 28, count).tolist()


def make(**kit: Any) -> Harness:
    return Harness(policy="cost", tier=kit)


def say(harness: Harness, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> int:
    """Run one request to its end; how many tokens of its prompt were cached."""
    harness.add(name, prompt, params)
    harness.run()
    audit(harness.cache)
    room = harness.max_model_len - len(prompt)
    assert (harness.tokens(name), harness.reason(name)) == greedy_by_hand(prompt, params, room)
    return harness.outputs[name][-1].num_cached_tokens


@pytest.mark.parametrize("length", range(2, 34))
def test_what_memory_gave_up_comes_back_from_the_host(length: int) -> None:
    harness = make()
    prompt = prompt_of(length, length)
    assert say(harness, "first", prompt) == 0
    harness.cache.index.clear()
    assert say(harness, "again", prompt) == (length - 1) // 4 * 4
    assert harness.cache._tier is not None
    assert harness.cache._tier.stats.hits == (length - 1) // 4 * 4


def tier(harness: Harness) -> Any:
    assert harness.kit is not None
    return harness.kit.tier


def jobs(harness: Harness) -> Any:
    assert harness.kit is not None
    return harness.kit.jobs


def hold_jobs(harness: Harness) -> Callable[[], None]:
    """Let nothing happen in the tier's threads until the call that this returns."""
    pump, jobs(harness).pump = jobs(harness).pump, lambda: None

    def go_on() -> None:
        jobs(harness).pump = pump

    return go_on


def test_what_the_device_has_is_not_asked_for() -> None:
    harness = make()
    prompt = prompt_of(1, 30)
    say(harness, "first", prompt)
    assert say(harness, "again", prompt) == 28
    assert tier(harness).stats.loads == 0


def test_the_longer_of_both_wins_and_only_the_rest_moves() -> None:
    harness = make()
    prompt = prompt_of(2, 40)
    say(harness, "short", prompt[:17])
    say(harness, "long", prompt)
    harness.cache.index.clear()
    say(harness, "short again", prompt[:17])
    assert tier(harness).stats.loads == 1
    moved: list[int] = []
    load = harness.runner._mover.load  # pyright: ignore[reportOptionalMemberAccess]

    def count(transfers: Any) -> None:
        moved.extend(transfer.device.size for transfer in transfers)
        load(transfers)

    harness.runner._mover.load = count  # pyright: ignore[reportOptionalMemberAccess]
    assert say(harness, "long again", prompt) == 36
    assert moved == [36 // 4 - 16 // 4 + 3]


def test_a_load_under_way_holds_up_nobody_and_comes_too_late() -> None:
    harness = make(timeout=15.0)
    prompt = prompt_of(3, 30)
    say(harness, "first", prompt)
    harness.cache.index.clear()
    go_on = hold_jobs(harness)
    harness.add("waits", prompt, GREEDY)
    harness.add("passes", prompt_of(4, 20), GREEDY)
    for _ in range(8):
        harness.step()
    assert harness.reason("passes") == "length"
    assert not harness.outputs["waits"]
    harness.run()
    assert harness.tokens("waits") == greedy_by_hand(prompt, GREEDY, 34)[0]
    assert harness.outputs["waits"][-1].num_cached_tokens == 0
    stats = tier(harness).stats
    assert (stats.failures["timeout"], stats.stale) == (1, 0)
    go_on()
    jobs(harness).pump()
    assert stats.stale == 1
    assert harness.kit is not None
    harness.kit.audit()
    assert not any(entry.pins for entry in tier(harness)._shelf.catalogue.entries.values())


def test_two_that_wait_for_the_same_prefix_wait_for_one_load() -> None:
    harness = make()
    prompt = prompt_of(5, 30)
    say(harness, "first", prompt)
    harness.cache.index.clear()
    harness.add("one", prompt, GREEDY)
    harness.add("two", [*prompt, 9], GREEDY)
    harness.run()
    assert harness.outputs["one"][-1].num_cached_tokens == 28
    assert harness.outputs["two"][-1].num_cached_tokens >= 28
    assert tier(harness).stats.failures["timeout"] == 0
    audit(harness.cache)


@pytest.mark.parametrize("steps", range(6))
def test_who_is_aborted_while_it_waits_leaves_nothing(steps: int) -> None:
    harness = make(chances={"slow_job": 0.5, "slow_move": 0.5}, seed=steps)
    prompt = prompt_of(6, 30)
    say(harness, "first", prompt)
    harness.cache.index.clear()
    harness.add("gone", prompt, GREEDY)
    for _ in range(steps):
        harness.step()
    harness.keep(harness.core.abort(["gone"]))
    audit(harness.cache)
    harness.run()
    jobs(harness).close()
    harness.assert_clean()
    assert harness.kit is not None
    harness.kit.audit()


def test_the_engine_goes_on_until_what_was_stored_is_stored() -> None:
    harness = make(chances={"slow_move": 0.8})
    harness.add("only", prompt_of(7, 30), GREEDY)
    harness.run()
    assert not harness.core.has_work
    assert tier(harness).stats.stores >= 2


def test_host_memory_keeps_what_was_used_last() -> None:
    harness = make(host_pages=26, seed=3)
    prompts = [prompt_of(10 + number, 17) for number in range(5)]
    for number, prompt in enumerate(prompts):
        say(harness, f"first {number}", prompt)
    assert tier(harness).stats.evicted > 0
    assert tier(harness).stats.host_bytes <= 26 * tier(harness).shape.page_bytes
    harness.cache.index.clear()
    assert say(harness, "last", prompts[-1]) >= 16
    harness.cache.index.clear()
    assert say(harness, "oldest", prompts[0]) == 0


def test_a_preempted_sequence_comes_back_from_the_host() -> None:
    harness = make()
    prompt = prompt_of(8, 20)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    harness.add("it", prompt, params)
    for _ in range(12):
        harness.step()
    (request,) = harness.scheduler.running
    computed = request.num_computed
    harness.scheduler._preempt(request)
    harness.step()
    harness.cache.index.clear()
    harness.run()
    assert harness.tokens("it") == greedy_by_hand(prompt, params, 44)[0]
    stats = harness.cache.stats
    assert stats.resumed_cached_tokens >= computed - 1
    assert stats.cached_tokens == 0


@pytest.mark.parametrize("backing", [0, 300])
def test_a_poisoned_sequence_leaves_nothing_in_the_tier(backing: int) -> None:
    harness = make(backing_pages=backing)
    prompt = prompt_of(9, 24)
    say(harness, "good", prompt)
    harness.model.poison = {27}
    harness.add("bad", [*prompt, 27], GREEDY)
    harness.run()
    assert harness.reason("bad") == "error"
    start = harness.outputs["bad"][-1].num_cached_tokens
    assert start >= 20
    harness.cache.index.clear()
    assert harness.kit is not None
    harness.kit.audit()
    left = [entry.meta.end for entry in tier(harness)._shelf.catalogue.entries.values()]
    assert max(left, default=0) < start
    assert say(harness, "good again", prompt) < start


def test_after_a_step_that_lost_copies_a_load_under_way_is_void() -> None:
    harness = make(chances={"slow_move": 1.0})
    prompt = prompt_of(11, 40)
    harness.kit.faults.slow_move = 0.0  # pyright: ignore[reportOptionalMemberAccess]
    say(harness, "short", prompt[:17])
    say(harness, "long", prompt)
    harness.cache.index.clear()
    say(harness, "short again", prompt[:17])
    harness.kit.faults.slow_move = 1.0  # pyright: ignore[reportOptionalMemberAccess]
    harness.add("it", prompt, GREEDY)
    for _ in range(4):
        harness.step()
    session: Any = harness.cache._tier
    (load,) = session._moving.values()
    assert load.shared.size == 4
    harness.cache.forget()
    audit(harness.cache)
    harness.kit.faults.slow_move = 0.0  # pyright: ignore[reportOptionalMemberAccess]
    harness.run()
    assert tier(harness).stats.failures["transfer"] == 1
    assert harness.outputs["it"][-1].num_cached_tokens in (0, 36)
    assert harness.tokens("it") == greedy_by_hand(prompt, GREEDY, 24)[0]
    harness.assert_clean()
