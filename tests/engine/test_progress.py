"""Nobody waits for ever: whatever the sizes, who is admitted advances, and who cannot be is told why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from k3hal.sampling_params import SamplingParams

from .harness import Harness
from .progress import play_configurations


def test_a_thousand_configurations_advance_to_their_ends() -> None:
    seen = play_configurations(range(1000))
    assert seen["ended"] > 2000 and seen["preempted"] > 20 and seen["hits"] > 1000
    assert seen["RequestError"] > 100 and seen["QueueFullError"] > 100 and not seen["without a reason"]


@pytest.mark.nightly
@pytest.mark.timeout(20_000)
@pytest.mark.usefixtures("unlogged")
def test_a_hundred_thousand_configurations_advance_to_their_ends(
    record_property: Callable[[str, object], None],
) -> None:
    seen = play_configurations(range(10_000, 110_000))
    record_property("seen", dict(seen))
    assert seen["configurations"] == 100_000 and not seen["without a reason"]


@pytest.mark.parametrize("length", [200, 800])
def test_a_short_prompt_waits_for_no_long_one(length: int) -> None:
    """Its first token comes after as many steps however much of the long prompt is left, and that goes on meanwhile."""
    harness = Harness(num_runs=400, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=1000)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    harness.add("long", [i % 20 + 2 for i in range(length)], params)
    harness.step()
    harness.add("short", [3] * 8, params)
    harness.step()
    assert len(harness.tokens("short")) == 1
    (long,) = [request for request in harness.scheduler.running if request.id == "long"]
    assert long.num_computed == 32 + 24


def test_long_prompts_that_come_all_the_time_hold_up_nobody() -> None:
    harness = Harness(num_runs=400, max_num_seqs=6, max_num_batched_tokens=32, max_model_len=400)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for number in range(4):
        harness.add(f"long{number}", [number + 2] * 300, params)
    harness.add("short", [3] * 5, params)
    steps = 0
    while not harness.tokens("short"):
        harness.step()
        steps += 1
    assert steps <= 4
    harness.run()
    harness.assert_clean()
