"""Steps planned before earlier ones are answered, and drafts: no output depends on either."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3hal.engine.async_engine import AsyncEngine
from k3hal.engine.flights import Flights
from k3hal.engine.interface import EngineOutput, EngineRequest
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

from .fold_model import VOCAB
from .harness import Harness, greedy_by_hand
from .test_fold_oracle import ARRIVALS, alone

LONG = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)
PROMPT = [2, 3, 4, 5, 6, 7]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=ARRIVALS,
    aborts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=3),
    sizes=st.fixed_dictionaries(
        {
            "num_runs": st.integers(8, 14),
            "max_num_seqs": st.sampled_from([1, 3, 6]),
            "max_num_batched_tokens": st.sampled_from([6, 7, 16, 33, 64]),
            "async_depth": st.integers(1, 3),
            "graphs": st.booleans(),
            "drafts": st.sampled_from([0, 0, 1, 3, 7]),
            "wrong_drafts": st.sampled_from([1, 2, 5, 1000]),
            "policy": st.sampled_from(["none", "interval:4", "cost"]),
        }
    ),
)
def test_every_output_equals_a_run_alone(
    arrivals: list[Any], aborts: list[tuple[int, int]], sizes: dict[str, Any]
) -> None:
    harness = Harness(**sizes)
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
    for i, (prompt, params, _, _) in enumerate(arrivals):
        name = f"r{i}"
        expected, reason = alone(prompt, params)
        got = harness.tokens(name)
        if name in aborted:
            assert harness.reason(name) == "abort"
            assert got == expected[: len(got)]
        else:
            assert (got, harness.reason(name)) == (expected, reason)


def stops_at(prompt: list[int], number: int) -> SamplingParams:
    """Parameters under which the answer ends with its `number`-th token, which no plan can foresee."""
    answer = greedy_by_hand(prompt, LONG, 58)[0]
    assert answer[number - 1] not in answer[: number - 1]
    return SamplingParams(temperature=0.0, max_tokens=22, stop_token_ids=(answer[number - 1],), ignore_eos=True)


def test_a_step_that_runs_on_a_thread_is_waited_for_when_it_is_dropped() -> None:
    flights, begun, go, ran = Flights(2), threading.Event(), threading.Event(), []
    harness = Harness()
    harness.add("a", PROMPT, LONG)
    scheduled = harness.scheduler.schedule()
    assert scheduled is not None

    class Slow:
        def execute(self, plan: StepPlan) -> StepResult:
            begun.set()
            assert go.wait(10)
            ran.append(plan.epoch)
            return StepResult(plan.epoch, [0])

    for _ in range(2):
        flights.start(Slow(), *scheduled)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    assert len(flights.drop(flights.land())) == 2
    assert ran == [0]
    flights.close()


def test_steps_run_on_a_thread_in_the_order_of_their_plans() -> None:
    harness = Harness(num_runs=12, policy="cost", async_depth=3)
    harness.core.flights = Flights(3)
    prompts = {f"r{i}": [*PROMPT, i + 2] for i in range(6)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, LONG)
    harness.run()
    harness.core.close()
    assert harness.ahead > 50
    for name, prompt in prompts.items():
        assert harness.tokens(name) == greedy_by_hand(prompt, LONG, 57)[0]


@pytest.mark.parametrize("depth", [2, 3])
def test_the_memory_of_an_ended_request_stays_until_its_last_step_has_run(depth: int) -> None:
    harness = Harness(async_depth=depth, max_num_seqs=1)
    harness.add("a", PROMPT, stops_at(PROMPT, 5))
    while harness.reason("a") is None if harness.outputs["a"] else True:
        harness.step()
    (request,) = harness.scheduler.leaving
    assert harness.scheduler.under_way == depth - 1
    assert harness.cache.slots[request.row] and harness.cache.usage > 0
    harness.run()
    assert harness.surplus > 0 and len(harness.tokens("a")) == 5
    harness.assert_clean()


def test_what_ran_behind_the_end_is_kept_under_its_own_name() -> None:
    """The state has moved on with the stop token: it serves whoever goes on with that, and nobody else."""
    harness = Harness(async_depth=2, policy="cost")
    params = stops_at(PROMPT, 5)
    harness.add("a", PROMPT, params)
    harness.run()
    whole = [*PROMPT, *harness.tokens("a")]
    harness.add("next", [*whole, 9, 9], LONG)
    harness.add("other", [*whole[:-1], (whole[-1] + 1) % (VOCAB - 2), 9], LONG)
    harness.run()
    assert harness.outputs["next"][-1].num_cached_tokens == len(whole)
    for name, end in (("next", [whole[-1], 9, 9]), ("other", [(whole[-1] + 1) % (VOCAB - 2), 9])):
        assert harness.tokens(name) == greedy_by_hand([*whole[:-1], *end], LONG, 60)[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_takes_along_what_was_planned_on_it_and_no_more(depth: int) -> None:
    harness = Harness(async_depth=depth, max_num_seqs=1)
    harness.add("a", PROMPT, LONG)
    harness.add("b", PROMPT[::-1], LONG)
    for _ in range(3):
        harness.step()
    harness.model.fail_next = 1
    harness.run()
    assert harness.reason("a") == "error"
    assert harness.tokens("b") == greedy_by_hand(PROMPT[::-1], LONG, 58)[0]
    harness.assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_interrupt_passes_through_and_leaves_an_engine_that_works(depth: int) -> None:
    harness = Harness(async_depth=depth, num_runs=12, policy="interval:4")
    for name in ("a", "b"):
        harness.add(name, [*PROMPT, len(name)], LONG)
    for _ in range(4):
        harness.step()
    execute = harness.runner.execute

    def interrupted(plan: StepPlan) -> StepResult:
        harness.runner.execute = execute
        raise KeyboardInterrupt

    harness.runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        harness.run()
    harness.keep(harness.core.abort_all())
    assert not harness.core.has_work and not harness.cache.usage
    harness.add("next", PROMPT, LONG)
    harness.run()
    assert harness.tokens("next") == greedy_by_hand(PROMPT, LONG, 58)[0]
    harness.assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_token_that_cannot_be_sampled_ends_a_request_whose_steps_are_under_way(depth: int) -> None:
    harness = Harness(async_depth=depth, policy="cost")
    answer = greedy_by_hand(PROMPT, LONG, 58)[0]
    harness.model.poison = {answer[3]}
    harness.add("a", PROMPT, LONG)
    harness.run()
    assert harness.reason("a") == "error" and harness.tokens("a") == answer[:4]
    assert not len(harness.cache.index.table), "a state nobody can trust is kept"
    harness.assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_ends_at_once_and_frees_when_the_steps_have_run(depth: int) -> None:
    harness = Harness(async_depth=depth)
    for name in ("a", "b"):
        harness.add(name, [*PROMPT, len(name)], LONG)
    for _ in range(4):
        harness.step()
    (ended,) = harness.keep(harness.core.abort(["a"]))
    assert ended.finish_reason == "abort"
    assert len(harness.scheduler.leaving) == (depth > 1)
    harness.run()
    harness.assert_clean()


def test_the_engine_thread_plans_ahead_and_drains() -> None:
    harness = Harness(num_runs=12, policy="cost")
    harness.core.flights = Flights(3)
    engine, outputs = AsyncEngine(harness.core), dict[str, list[int]]()
    prompts = {f"r{i}": [*PROMPT, i + 2] for i in range(5)}

    def collect(increments: Sequence[EngineOutput]) -> None:
        for output in increments:
            outputs.setdefault(output.request_id, []).extend(output.token_ids)

    engine.start(collect)
    for name, prompt in prompts.items():
        engine.submit(EngineRequest(name, prompt, LONG))
    engine.submit(EngineRequest("gone", PROMPT, LONG))
    engine.abort(["gone"])
    engine.close(drain_timeout=60)
    assert harness.scheduler.idle and not harness.core.flights
    for name, prompt in prompts.items():
        assert outputs[name] == greedy_by_hand(prompt, LONG, 57)[0]


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.7, seed=6, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12, min_tokens=4),
    SamplingParams(temperature=1.0, seed=7, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=8, logit_bias={5: 4.0, 7: -50.0}, max_tokens=6, stop_token_ids=(11, 12)),
    SamplingParams(temperature=1.0, seed=9, n=2, max_tokens=8),
]


def test_the_nano_model_answers_the_same_at_every_depth(nano_dir: Path) -> None:
    answers = []
    for depth in (1, 2, 3):
        sizes: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
        with LLM(nano_dir, **sizes, async_depth=depth) as model:
            outputs = model.generate([[3 + i] * (5 + 7 * i) for i in range(len(MIXED))], MIXED)
        ends = [(one.token_ids, one.finish_reason, one.logprobs) for output in outputs for one in output.outputs]
        answers.append(ends)
    assert answers[0] == answers[1] == answers[2]
