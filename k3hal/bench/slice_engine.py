"""Real steps of an engine: how long its prompts and its decode steps take, and when the device had nothing to do."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from k3hal.bench.engine import draw_prompts
from k3hal.bench.spread import Spread
from k3hal.dispatch.runtime import DeviceRuntime
from k3hal.engine.build import BuiltEngine
from k3hal.engine.interface import EngineOutput, EngineRequest
from k3hal.engine.step_times import StepTimes
from k3hal.errors import UnsupportedError
from k3hal.sampling_params import SamplingParams

_WARM, _TIMED = 8, 48


def engine_steps(
    built: BuiltEngine, batches: Sequence[int], prompt: int, runtime: DeviceRuntime, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Of each batch the tokens/s of its prompts, the seconds of a step in which all decode, the share of idle time.

    Other prompts come before, as a warm-up. `idle` is None on a CPU. Raises `UnsupportedError` when a request fails.
    """
    out = []
    for batch in batches:
        first, second = (draw_prompts(batch, prompt, built.tokenizer.special_base, 2 * batch + i) for i in range(2))
        # Kernels are compiled for a batch when it first comes.
        _measured(built, first, runtime, timed=False)
        row = _measured(built, second, runtime, timed=True)
        idle = "" if row["idle"] is None else f", device idle {100 * row['idle']:.1f} %"
        say(f"engine, {batch} at once: step {1e6 * row['step']['median']:.0f} us{idle}")
        out.append(row)
    return out


def _measured(
    built: BuiltEngine, prompts: Sequence[list[int]], runtime: DeviceRuntime, *, timed: bool
) -> dict[str, Any]:
    """A row of the report; with `timed` False only its prompts and a few steps are run, and the row is empty."""
    core = built.engine.core
    try:
        seconds = _prefilled(built, prompts)
        for _ in range(_WARM):
            step(built)
        if not timed:
            return {}
        steps, times = _timed(built, runtime)
    finally:
        end_all(built, runtime)
    host = {part: median(getattr(times, part)) for part in ("schedule", "launch", "wait", "deliver")}
    return {
        "batch": len(prompts),
        "prompt": len(prompts[0]),
        "depth": core.flights.depth,
        "prefill_tokens_per_s": sum(map(len, prompts)) / seconds,
        "tokens_per_s": len(prompts) / median(steps),
        "step": dataclasses.asdict(Spread.of(steps)),
        "host": host,
        "device": median(times.device()) if times.runtime else None,
        "idle": times.idle_share() if times.runtime else None,
    }


def end_all(built: BuiltEngine, runtime: DeviceRuntime) -> None:
    """End every request; what was launched is over afterwards."""
    core = built.engine.core
    core.abort_all()
    while core.has_work:
        core.step()
    runtime.synchronize()


def _prefilled(built: BuiltEngine, prompts: Sequence[list[int]]) -> float:
    """Seconds until each of `prompts` has its first token."""
    # Steps planned ahead, and prompts that end in different steps, take some more.
    params = SamplingParams(temperature=0.0, max_tokens=2 * (_WARM + _TIMED) + 64, ignore_eos=True)
    begun = time.perf_counter()
    for index, prompt in enumerate(prompts):
        built.engine.core.add(EngineRequest(f"slice-{index}", prompt, params))
    decoding: set[str] = set()
    while len(decoding) < len(prompts):
        decoding |= {output.request_id for output in step(built) if output.token_ids}
    return time.perf_counter() - begun


def _timed(built: BuiltEngine, runtime: DeviceRuntime) -> tuple[list[float], StepTimes]:
    """Seconds of each of some steps, and how host and device spent them."""
    times = StepTimes(runtime if built.runner.asynchronous else None)
    built.engine.core.timings = built.runner.timings = times
    steps = []
    try:
        for _ in range(_TIMED):
            begun = time.perf_counter()
            step(built)
            steps.append(time.perf_counter() - begun)
    finally:
        built.engine.core.timings = built.runner.timings = None
    return steps, times


def step(built: BuiltEngine) -> list[EngineOutput]:
    """One step, and what came of it. Raises `UnsupportedError` when a request failed."""
    outputs = built.engine.core.step()
    failed = next((output.error for output in outputs if output.finish_reason == "error"), None)
    if failed:
        raise UnsupportedError(f"the engine failed during the measurement: {failed}")
    return list(outputs)
