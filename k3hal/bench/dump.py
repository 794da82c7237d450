"""`k3hal bench dump`: what an armed recorder (`K3HAL_DUMP`) that does not fire costs a decode step."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.bench.engine import draw_prompts
from k3hal.bench.machine import circumstances
from k3hal.bench.spread import Spread
from k3hal.checkpoints import resolve_model
from k3hal.debug.dump_spec import parse_dump
from k3hal.debug.record import Recorder
from k3hal.debug.step_trail import LENGTH
from k3hal.dispatch.observe import Place, Step, observing
from k3hal.dispatch.select import Decision
from k3hal.engine.build import BuiltEngine, build_engine
from k3hal.engine.interface import EngineRequest
from k3hal.errors import UnsupportedError, UsageError
from k3hal.model.requests import PAGE_TOKENS
from k3hal.sampling_params import SamplingParams

SCHEMA = "k3hal.bench_dump/1"

LIMIT = 1.03
"""Most that a step may take with `nonfinite` armed, in steps without."""

UNARMED, CONTROL = "unarmed", "unarmed again"
ARMED = {"step:N": "step:1000000000", "nonfinite": "nonfinite"}
"""Conditions that do not fire here, by the name they are reported under."""

_BLOCK = LENGTH
"""Steps that an arm has in a row: each of its blocks pays for one copy of the states, as steady decoding does."""
_ROUNDS_A_RUN = 7
"""Rounds before the sequences start anew: contexts stay short, so that a step stays one of the shortest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpBench:
    """What to measure. In each of `rounds` every arm has one block of steps, in an order drawn from `seed`."""

    model: str | None = None
    dtype: str = "auto"
    ops: str | None = None
    concurrency: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 32
    rounds: int = 21
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise UsageError("--concurrency needs numbers of at least 1", hint="like --concurrency 1,16")
        for flag, value in (("--prompt-tokens", self.prompt_tokens), ("--repeat", self.rounds)):
            if value < 1:
                raise UsageError(f"{flag} is {value}", hint="it is at least 1")


class Arms:
    """The observer of the measured engine: what it calls goes through the recorder of the arm that is on, or none."""

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self.recorders = recorders
        self.on = UNARMED

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        functions = {name: recorder.bound(place, decision, fn) for name, recorder in self.recorders.items()}
        if all(function is fn for function in functions.values()):
            return fn
        functions |= {UNARMED: fn, CONTROL: fn}
        return lambda *args, **kwargs: functions[self.on](*args, **kwargs)

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        for recorder in self.recorders.values():
            recorder.prepared(place, decision, given, prepared)

    def stepping(self, step: Step) -> None:
        if recorder := self.recorders.get(self.on):
            recorder.stepping(step)

    def stepped(self, step: Step, hidden: Tensor) -> None:
        if recorder := self.recorders.get(self.on):
            recorder.stepped(step, hidden)


def bench_dump(settings: DumpBench, say: Callable[[str], None]) -> dict[str, Any]:
    """The report, without its schema. One thread, since the clock is the process's own time.

    Raises what `build_engine` raises, and `UnsupportedError` where the model's results are not finite.
    """
    source = resolve_model(settings.model)
    with tempfile.TemporaryDirectory() as cases, _one_thread():
        before = circumstances()
        recorders = {name: Recorder(parse_dump(f"when={when},dir={cases}")) for name, when in ARMED.items()}
        arms = Arms(recorders)
        say(f"loading {source.name}")
        with observing(arms):
            built = _built(settings, str(source))
        results = [_result(_measured(built, arms, settings, n, say), n) for n in settings.concurrency]
        dtype = str(built.runner.arena.layout.dtype).removeprefix("torch.")
        built.engine.close()
        if any(recorder.files for recorder in recorders.values()):
            raise UnsupportedError(f"{source.name} gives results that are not finite: recording them was measured")
    return {
        **before,
        "model": {"name": source.name},
        "dtype": dtype,
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("model", "dtype")},
        "block": _BLOCK,
        "limit": LIMIT,
        "within_limit": all(r["arms"]["nonfinite"]["ratio"]["median"] < LIMIT for r in results),
        "results": results,
    }


def _built(settings: DumpBench, source: str) -> BuiltEngine:
    tokens = _ROUNDS_A_RUN * (len(ARMED) + 2) * _BLOCK
    return build_engine(
        source,
        device="cpu",
        dtype=settings.dtype,
        ops=settings.ops,
        max_num_seqs=max(settings.concurrency),
        max_model_len=settings.prompt_tokens + tokens + PAGE_TOKENS,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measured(
    built: BuiltEngine, arms: Arms, settings: DumpBench, concurrency: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds a step of each arm's blocks, after one round that warms everything up."""
    say(f"{concurrency} at once: {settings.rounds} rounds")
    prompts = draw_prompts(concurrency, settings.prompt_tokens, built.tokenizer.special_base, settings.seed)
    times: dict[str, list[float]] = {name: [] for name in (UNARMED, CONTROL, *ARMED)}
    order = random.Random(settings.seed)
    _rounds(built, arms, prompts, 1, order, {name: [] for name in times})
    for first in range(0, settings.rounds, _ROUNDS_A_RUN):
        _rounds(built, arms, prompts, min(_ROUNDS_A_RUN, settings.rounds - first), order, times)
    return times


def _rounds(
    built: BuiltEngine,
    arms: Arms,
    prompts: list[list[int]],
    count: int,
    order: random.Random,
    times: dict[str, list[float]],
) -> None:
    """Prefill unarmed, then `count` rounds of decoding; every prompt decodes in every step."""
    core = built.engine.core
    length = len(prompts[0]) + count * len(times) * _BLOCK + PAGE_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=length - len(prompts[0]), ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(EngineRequest(f"bench-{index}", prompt, params))
    arms.on, begun = UNARMED, set[str]()
    while len(begun) < len(prompts):
        begun |= {output.request_id for output in core.step()}
    for _ in range(count):
        for name in order.sample(list(times), len(times)):
            arms.on = name
            start = time.process_time()
            for _ in range(_BLOCK):
                core.step()
            times[name].append((time.process_time() - start) / _BLOCK)
    if core.stats().num_running != len(prompts):
        raise UnsupportedError("sequences ended during the measurement")
    core.abort_all()


def _result(times: Mapping[str, list[float]], concurrency: int) -> dict[str, Any]:
    """Each arm's time a step, and its ratios to the unarmed block of the same round."""
    arms = {
        name: {
            "step": dataclasses.asdict(Spread.of(seconds)),
            "ratio": dataclasses.asdict(Spread.of([a / b for a, b in zip(seconds, times[UNARMED], strict=True)])),
        }
        for name, seconds in times.items()
    }
    return {"concurrency": concurrency, "arms": arms}
