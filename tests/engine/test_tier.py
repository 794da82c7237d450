"""Prefixes that left the device's memory come back from the external tier, and nothing but them."""

from __future__ import annotations

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
