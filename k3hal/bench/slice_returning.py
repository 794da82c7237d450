"""How soon a prompt is answered whose head was answered before: the time to its first token, and what was cached."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from k3hal.bench.engine import draw_prompts
from k3hal.bench.slice_engine import end_all, step
from k3hal.bench.spread import Spread
from k3hal.dispatch.runtime import DeviceRuntime
from k3hal.engine.build import BuiltEngine
from k3hal.engine.interface import EngineRequest
from k3hal.sampling_params import SamplingParams

TAIL, _TIMES = 64, 20


def returning_prompts(
    built: BuiltEngine, lengths: Sequence[int], runtime: DeviceRuntime, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Of each length: seconds to the first token of one prompt alone, whose first tokens that many tokens long are in
    the cache and whose last `TAIL` are not, and of the first such prompt, of which nothing is.

    What is in the cache of the later ones ends at a place where the cache keeps a state, so up to one page before
    `length`; `cached` is the least of them. Raises `UnsupportedError` when a request fails.
    """
    out = []
    for length in lengths:
        # Other tokens of the same length come before: kernels are compiled when a length first comes.
        _answered(built, _prompts(built, length, 2, seed=1))
        (cold, *returned), cached = _answered(built, _prompts(built, length, _TIMES + 2, seed=2))
        # The first that returns is the one at which the common part is found, and kept from then on.
        times = Spread.of(returned[1:])
        row = {"tokens": length, "tail": TAIL, "cold": cold, "cached": min(cached[2:])}
        say(
            f"a prompt of {length} tokens alone: {1e3 * cold:.2f} ms; returning with {TAIL} more, {row['cached']} "
            f"cached: {1e3 * times.median:.2f} ms"
        )
        out.append({**row, "first_token": dataclasses.asdict(times)})
        end_all(built, runtime)
    return out


def _prompts(built: BuiltEngine, length: int, count: int, seed: int) -> list[list[int]]:
    """So many prompts with a common head of `length` tokens and tails of their own."""
    base = built.tokenizer.special_base
    (head,) = draw_prompts(1, length, base, 1000 * seed)
    return [head + tail for tail in draw_prompts(count, TAIL, base, 1000 * seed + 1)]


def _answered(built: BuiltEngine, prompts: Sequence[list[int]]) -> tuple[list[float], list[int]]:
    """Seconds to the first token of each prompt, one after the other, and how many of its tokens were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds, cached = [], []
    for index, prompt in enumerate(prompts):
        begun = time.perf_counter()
        built.engine.core.add(EngineRequest(f"returning-{index}", prompt, params))
        outputs = []
        while not outputs:
            outputs = [output for output in step(built) if output.token_ids]
        seconds.append(time.perf_counter() - begun)
        cached.append(outputs[0].num_cached_tokens)
        while built.engine.core.has_work:
            step(built)
    return seconds, cached
