"""Whatever arrives, stops, is aborted or preempted: each output is that of the sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from k3hal.engine.core import Runner
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.sampling_params import SamplingParams

from .fold_model import VOCAB
from .harness import Harness, greedy_by_hand

PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
GREEDY = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_tokens=st.integers(5, 30),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (2,), (5, 7)]),
)
SAMPLED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([None, {3: 2.0, 4: -100.0}]),
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 30),
    ignore_eos=st.just(True),
    logprobs=st.sampled_from([None, 2]),
)
ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.one_of(GREEDY, SAMPLED), st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=8
)


def alone(prompt: list[int], params: SamplingParams) -> tuple[list[int], str | None]:
    """The request by itself, its prompt in one chunk, in an engine with room to spare."""
    harness = Harness(max_num_batched_tokens=64, max_num_seqs=1)
    harness.add("r", prompt, params)
    harness.run()
    return harness.tokens("r"), harness.reason("r")


WORKLOAD = given(
    arrivals=ARRIVALS,
    aborts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=3),
    num_runs=st.integers(8, 14),
    max_num_seqs=st.sampled_from([1, 3, 6]),
    budget=st.sampled_from([6, 7, 16, 33, 64]),
)


def check_against_runs_alone(
    arrivals: list[tuple[list[int], SamplingParams, int, int]],
    aborts: list[tuple[int, int]],
    num_runs: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    """Run a workload of (prompt, parameters, priority, step of arrival) and (request, step) of aborts."""
    harness = Harness(num_runs=num_runs, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    pending = {f"r{i}": arrival for i, arrival in enumerate(arrivals)}
    aborted: set[str] = set()
    for step in range(5000):
        for name in [n for n, arrival in pending.items() if arrival[3] <= step]:
            prompt, params, priority, _ = pending.pop(name)
            harness.add(name, prompt, params, priority)
        for index, when in aborts:
            if when == step:
                aborted.update(o.request_id for o in harness.keep(harness.core.abort([f"r{index}"])))
        harness.step()
        if not pending and not harness.core.has_work:
            break
    harness.assert_clean()
    event(f"preempted: {harness.scheduler.preemptions > 0}")
    for i, (prompt, params, _, _) in enumerate(arrivals):
        name = f"r{i}"
        expected, reason = alone(prompt, params)
        if params.temperature == 0.0:
            assert (expected, reason) == greedy_by_hand(prompt, params, 64 - len(prompt))
        got = harness.tokens(name)
        if name in aborted:
            assert harness.reason(name) == "abort"
            assert got == expected[: len(got)]
        else:
            assert (got, harness.reason(name)) == (expected, reason)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@WORKLOAD
def test_every_output_equals_a_run_alone(**workload: Any) -> None:
    check_against_runs_alone(**workload)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@WORKLOAD
def test_many_outputs_equal_a_run_alone(**workload: Any) -> None:
    check_against_runs_alone(**workload)


def test_a_tight_pool_preempts_and_changes_nothing() -> None:
    harness = Harness(num_runs=9, max_num_seqs=4)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, frequency_penalty=0.3)
    prompts = {f"r{i}": [i + 2] * (3 + i) for i in range(4)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, params)
    harness.run()
    harness.assert_clean()
    assert harness.scheduler.preemptions >= 2
    assert harness.model.cells_checked > 500
    for name, prompt in prompts.items():
        assert harness.tokens(name) == alone(prompt, params)[0]


def scatter(harness: Harness) -> None:
    """Three sequences grow side by side until memory is full, two of them end: their pages lie in every run."""
    for i in range(3):
        harness.add(f"long{i}", [i + 2] * 4, LONG)
    while len(harness.tokens("long0")) < 16:
        harness.step()
    harness.keep(harness.core.abort(["long1", "long2"]))
    for i in range(4):
        harness.add(f"next{i}", [i + 2] * 2, LONG)


LONG = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)


def test_scattered_pages_are_moved_together_for_a_slot() -> None:
    harness = Harness(num_runs=9, max_num_seqs=8)
    scatter(harness)
    harness.step()
    assert harness.pages_copied > 0
    assert len(harness.scheduler.running) >= 4
    harness.run()
    harness.assert_clean()
    assert harness.tokens("long0") == greedy_by_hand([2] * 4, LONG, 60)[0]
    for i in range(4):
        assert harness.tokens(f"next{i}") == greedy_by_hand([i + 2] * 2, LONG, 62)[0]


def test_the_oracle_sees_a_skipped_copy() -> None:
    harness = Harness(num_runs=9, max_num_seqs=8, skip_copies=True)
    scatter(harness)
    assert "does not continue its prefix" in (harness.step()[0].error or "")


@dataclass
class Tampered:
    """A runner that gets other plans than the scheduler made."""

    runner: Runner
    change: Callable[[StepPlan], StepPlan]

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(self.change(plan))


def swap_slots(plan: StepPlan) -> StepPlan:
    return replace(plan, slots=plan.slots[::-1].copy())


def share_a_page(plan: StepPlan) -> StepPlan:
    pages = plan.page_table.copy()
    pages[0, 1] = pages[1, 1]
    return replace(plan, page_table=pages)


def skip_a_token(plan: StepPlan) -> StepPlan:
    return replace(plan, context_lens=plan.context_lens - 1)


@pytest.mark.parametrize("change", [swap_slots, share_a_page, skip_a_token])
def test_the_oracle_sees_a_wrong_cell(change: Callable[[StepPlan], StepPlan]) -> None:
    harness = Harness()
    harness.add("a", [2, 3, 4, 5, 6, 7], LONG)
    harness.add("b", [4, 5, 6, 7, 8, 9], LONG)
    harness.step()
    harness.core.runner = Tampered(harness.runner, change)
    harness.step()
    assert (harness.outputs["a"][-1].error or "").startswith("CellError")
