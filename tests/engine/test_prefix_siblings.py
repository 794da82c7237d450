"""Prompts that come at the same time compute what they share once."""

from __future__ import annotations

from k3hal.sampling_params import SamplingParams

from .harness import Harness, greedy_by_hand


def test_siblings_that_come_together_wait_for_the_first_and_not_for_long() -> None:
    harness = Harness(num_runs=60, max_num_seqs=4, max_num_batched_tokens=64, policy="cost")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    shared = [2, 3, 4, 5, 6, 7, 8, 9] * 4
    for child in range(3):
        harness.add(f"r{child}", [*shared, 10 + child, 11, 12, 13, 14], params)
    harness.add("other", [20] * 9, params)
    harness.step()
    assert [request.id for request in harness.scheduler.running] == ["r0", "other"]
    harness.run()
    timings = {name: outputs[-1].timing for name, outputs in harness.outputs.items()}
    started = {name: timing.scheduled for name, timing in timings.items() if timing is not None}
    assert sorted(started, key=started.__getitem__) == ["r0", "other", "r1", "r2"]
    cached = {name: outputs[-1].num_cached_tokens for name, outputs in harness.outputs.items()}
    assert cached == {"r0": 0, "r1": 32, "r2": 32, "other": 0}


def test_a_crowd_of_siblings_is_served_from_the_first() -> None:
    harness = Harness(num_runs=200, max_num_seqs=8, max_num_batched_tokens=64, policy="cost")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    shared = [2, 3, 4, 5, 6, 7, 8, 9] * 4
    for child in range(60):
        harness.add(f"r{child}", [*shared, 10 + child % 15, 3 + child // 15, 12], params)
    harness.run()
    cached = [outputs[-1].num_cached_tokens for outputs in harness.outputs.values()]
    assert cached[0] == 0
    assert min(cached[1:]) >= 32
    for child in (0, 7, 59):
        prompt = [*shared, 10 + child % 15, 3 + child // 15, 12]
        assert harness.tokens(f"r{child}") == greedy_by_hand(prompt, params, 29)[0]


def test_one_that_waits_is_let_in_when_the_other_goes() -> None:
    harness = Harness(num_runs=60, max_num_seqs=4, max_num_batched_tokens=8, policy="cost")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for name in ("first", "second"):
        harness.add(name, [*[2, 3, 4, 5] * 8, 9], params)
    harness.step()
    assert [request.id for request in harness.scheduler.waiting] == ["second"]
    harness.keep(harness.core.abort(["first"]))
    harness.step()
    assert [request.id for request in harness.scheduler.running] == ["second"]
    harness.run()
    assert harness.reason("second") == "length"
