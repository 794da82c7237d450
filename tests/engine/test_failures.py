"""What a failing step, a poisoned sequence or a dead engine does to the others."""

from __future__ import annotations

import pytest

from k3hal.engine.core import FAILED_STEPS_UNTIL_DEAD
from k3hal.errors import EngineDeadError
from k3hal.sampling_params import SamplingParams

from .harness import Harness, greedy_by_hand

LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_a_failed_step_ends_its_requests_and_spares_the_waiting() -> None:
    harness = Harness(max_num_seqs=2)
    for name in ("a", "b", "c"):
        harness.add(name, [2, 3], LONG)
    harness.step()
    harness.model.fail_next = 1
    outputs = harness.step()
    assert {(o.request_id, o.finish_reason) for o in outputs} == {("a", "error"), ("b", "error")}
    assert outputs[0].error == "RuntimeError: simulated kernel failure"
    harness.run()
    harness.assert_clean()
    assert harness.tokens("c") == greedy_by_hand([2, 3], LONG, 62)[0]


def test_the_engine_is_dead_after_steps_that_fail_in_a_row() -> None:
    harness = Harness(max_num_seqs=1)
    for i in range(6):
        harness.add(f"r{i}", [2, 3], LONG)
    harness.model.fail_next = 100
    for _ in range(FAILED_STEPS_UNTIL_DEAD):
        assert harness.core.dead is None
        harness.step()
    assert {harness.reason(f"r{i}") for i in range(6)} == {"error"}
    with pytest.raises(EngineDeadError, match="simulated kernel failure"):
        harness.add("late", [2], LONG)
    assert harness.step() == []


def test_a_good_step_between_failures_resets_the_count() -> None:
    harness = Harness(max_num_seqs=1)
    for i in range(FAILED_STEPS_UNTIL_DEAD + 2):
        harness.model.fail_next = 1
        harness.add(f"bad{i}", [2, 3], LONG)
        harness.step()
        harness.add(f"good{i}", [2, 3], LONG)
        harness.run()
        assert (harness.reason(f"bad{i}"), harness.reason(f"good{i}")) == ("error", "length")
    assert harness.core.dead is None


def test_logits_that_are_not_finite_end_only_their_own_request() -> None:
    harness = Harness()
    harness.model.poison = {28}
    seeded = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, logit_bias={28: -100.0})
    harness.add("poisoned", [2, 28], seeded)
    harness.add("clean", [2, 3], seeded)
    harness.run()
    harness.assert_clean()
    assert harness.reason("poisoned") == "error"
    assert "not finite" in (harness.outputs["poisoned"][-1].error or "")
    assert harness.reason("clean") == "length"


def test_a_slot_starts_clean_after_another_sequence() -> None:
    harness = Harness(num_runs=5, max_num_seqs=1)
    for i in range(6):
        harness.add(f"r{i}", [i + 2, 3], LONG)
    harness.run()
    for i in range(6):
        assert harness.tokens(f"r{i}") == greedy_by_hand([i + 2, 3], LONG, 62)[0]


def test_a_plan_that_comes_twice_is_refused() -> None:
    harness = Harness()
    harness.add("a", [2, 3], LONG)
    scheduled = harness.scheduler.schedule()
    assert scheduled is not None
    harness.runner.execute(scheduled[0])
    with pytest.raises(RuntimeError, match="step 0 came after step 0"):
        harness.runner.execute(scheduled[0])
