"""Any step of any schedule can be repeated from the caches it found, and nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3hal.debug.memory import same_bytes
from k3hal.debug.step_trail import LENGTH, StepTrail
from k3hal.dispatch.observe import Place, Step, is_repetition, observing
from k3hal.dispatch.select import Decision
from k3hal.sampling_params import SamplingParams

from .fold_model import VOCAB
from .harness import Harness, greedy_by_hand
from .test_fold_oracle import LONG, scatter


class Repeater:
    """Repeats every step. What the step found, as copied by brute force ahead of it, must be what it finds again."""

    def __init__(self) -> None:
        self.trail = StepTrail()
        self.found = torch.zeros(0)
        self.repeated = self.runs = self.copies = 0

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        pass

    def stepping(self, step: Step) -> None:
        before = self.trail._held
        self.trail.add(step)
        self.copies += self.trail._held is not before
        self.found = step.states.clone()

    def stepped(self, step: Step, hidden: Tensor) -> None:
        self.trail.done()
        self.runs += 1
        memory = [step.states, *step.kv]
        now = [part.clone() for part in memory]
        with self.trail.rewound() as live:
            held = step.slots[step.context_lens > 0].tolist()
            assert same_bytes(step.states[held], self.found[held]), "not the states that the step found"
            assert is_repetition()
            assert same_bytes(step.run(), hidden), "not the same result"
            assert live.hold_still(), "not the same caches"
            step.states[step.slots.tolist()] = 7
            assert not live.hold_still()
        assert all(map(same_bytes, memory, now)), "a trace of the repetition"
        assert not is_repetition()
        self.repeated += 1


def _harness(**sizes: Any) -> tuple[Harness, Repeater]:
    repeater = Repeater()
    with observing(repeater):
        return Harness(**sizes), repeater


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        st.integers(1, 30),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS, st.integers(8, 14), st.sampled_from([1, 3, 6]), st.sampled_from([6, 16, 64]))
def test_every_step_repeats(
    requests: list[tuple[list[int], int, int]], num_runs: int, max_num_seqs: int, budget: int
) -> None:
    harness, repeater = _harness(num_runs=num_runs, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    waiting = dict(enumerate(requests))
    for step in range(2000):
        for i in [i for i, request in waiting.items() if request[2] <= step]:
            prompt, count, _ = waiting.pop(i)
            harness.add(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        harness.step()
        if not waiting and not harness.core.has_work:
            break
    harness.assert_clean()
    assert repeater.repeated == repeater.runs > 0
    for i, (prompt, count, _) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        assert harness.tokens(f"r{i}") == greedy_by_hand(prompt, params, 64 - len(prompt))[0]


def test_preemption_and_moved_pages_begin_anew() -> None:
    harness, repeater = _harness(num_runs=9, max_num_seqs=8)
    scatter(harness)
    harness.run()
    assert harness.pages_copied > 0 and harness.scheduler.preemptions > 0
    assert harness.tokens("long0") == greedy_by_hand([2] * 4, LONG, 60)[0]
    for i in range(4):
        assert harness.tokens(f"next{i}") == greedy_by_hand([i + 2] * 2, LONG, 62)[0]
    assert repeater.repeated == repeater.runs > 20


def test_steady_decoding_copies_once_in_a_while() -> None:
    harness, repeater = _harness()
    params = SamplingParams(temperature=0.0, max_tokens=2 * LENGTH + 1, ignore_eos=True)
    harness.add("a", [2, 3, 4], params)
    harness.add("b", [4, 5, 6, 7], params)
    harness.run()
    assert repeater.runs == 2 * LENGTH + 1
    assert repeater.copies == 3
    assert repeater.trail._buffer is not None
    assert repeater.trail._buffer.nbytes == 2 * harness.arena.layout.slot_bytes


def _decode_step(**changes: Any) -> Step:
    """Step 1 of two sequences; it does nothing."""
    slots, context = np.array([2, 1], np.int32), np.array([7, 5], np.int32)
    fields: dict[str, Any] = {"num_decodes": 2, "slots": slots, "context_lens": context, "new_lens": np.ones(2, int)}
    fields |= {"kv": (), "kv_rows": torch.zeros(2, dtype=torch.int64), "moved": False}
    return Step(run=lambda: torch.zeros(2, 4), **{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, 1),
        ({"moved": True}, 2),
        ({"slots": np.array([1, 2], np.int32)}, 2),
        ({"slots": np.array([2, 3], np.int32)}, 2),
        ({"context_lens": np.array([8, 7], np.int32)}, 2),
        ({"num_decodes": 1}, 2),
        ({"states": torch.zeros(4, 8, dtype=torch.uint8)}, 2),
    ],
    ids=["the next step", "pages moved", "another order", "another slot", "a token missed", "a prefill", "an engine"],
)
def test_only_the_next_step_of_the_same_sequences_continues(changes: dict[str, Any], copies: int) -> None:
    repeater, grown = Repeater(), np.array([8, 6], np.int32)
    first = _decode_step(states=torch.zeros(4, 8, dtype=torch.uint8))
    for step in (first, _decode_step(**{"states": first.states, "context_lens": grown, **changes})):
        repeater.stepping(step)
        repeater.stepped(step, step.run())
    assert repeater.copies == copies


def test_the_step_after_one_that_failed_begins_anew() -> None:
    repeater = Repeater()
    first = _decode_step(states=torch.zeros(4, 8, dtype=torch.uint8))
    repeater.stepping(first)
    repeater.stepping(_decode_step(states=first.states, context_lens=np.array([8, 6], np.int32)))
    assert repeater.copies == 2


def test_a_step_that_failed_is_not_part_of_a_trail() -> None:
    harness, repeater = _harness()
    harness.add("a", [2, 3, 4], LONG)
    harness.step()
    harness.model.fail_next = 1
    assert harness.step()[0].finish_reason == "error"
    harness.add("b", [3, 4, 5], LONG)
    harness.run()
    assert harness.tokens("b") == greedy_by_hand([3, 4, 5], LONG, 61)[0]
    assert repeater.repeated == repeater.runs


def test_a_repetition_that_fails_leaves_the_caches_as_they_were() -> None:
    harness, repeater = _harness()
    harness.add("a", [2, 3, 4], LONG)
    harness.step()
    harness.step()
    before = harness.arena.pages.clone()

    def half_way() -> None:
        with repeater.trail.rewound():
            assert not torch.equal(harness.arena.pages, before)
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_way()
    assert torch.equal(harness.arena.pages, before)
    harness.run()
    assert harness.tokens("a") == greedy_by_hand([2, 3, 4], LONG, 61)[0]
