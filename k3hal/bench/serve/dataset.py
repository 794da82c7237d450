"""Who asks what, and when: synthetic prompts at a rate, or a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from k3hal.bench.cache.sources import load_trace
from k3hal.bench.cache.trace import TraceRequest
from k3hal.bench.serve.options import CHAT, ServeBench
from k3hal.errors import UsageError

_IDS = 256
"""Prompts use token ids below this: single bytes in K3's vocabularies, ordinary tokens in any other."""

_WORDS = (" the", " and")
"""One token each in every vocabulary we know; a prompt of them has as many tokens as words."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: `due` seconds after the start, what its prompt is, how many tokens are asked for."""

    due: float
    prompt: Callable[[], list[int]]
    output_len: int


def plan_requests(settings: ServeBench) -> list[Planned]:
    """All requests in order of their arrival. Raises what `load_trace` raises."""
    rng = np.random.default_rng(settings.seed)
    if settings.trace is None:
        times = arrivals(settings.num_prompts, settings.request_rate or math.inf, settings.burstiness, rng)
        seeds = rng.integers(0, 1 << 62, settings.num_prompts)
        return [
            Planned(due, _synthetic(int(seed), settings.input_len), settings.output_len)
            for due, seed in zip(times, seeds, strict=True)
        ]
    requests = load_trace(settings.trace).requests[: settings.num_prompts]
    if any(request.after is not None for request in requests):
        raise UsageError(
            f"--dataset {settings.dataset}: its requests wait for answers, which an open loop does not",
            hint="a trace's arrivals must be times alone",
        )
    times = [request.arrival - requests[0].arrival for request in requests]
    if settings.request_rate is not None:
        times = arrivals(len(requests), settings.request_rate, settings.burstiness, rng)
    return [
        Planned(due, _of_trace(request), max(1, request.output.size))
        for due, request in zip(times, requests, strict=True)
    ]


def arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds at which `count` requests arrive: the first at 0, the last when `rate` says it should."""
    if math.isinf(rate) or count == 1:
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count - 1)
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    return (times * ((count - 1) / rate / times[-1])).tolist()


def bodies(planned: Sequence[Planned], settings: ServeBench, model: str) -> Iterator[bytes]:
    """The JSON of each request, made when it is asked for: prompts of a trace would not fit in memory together."""
    for request in planned:
        yield orjson.dumps(_body(request.prompt(), request.output_len, settings.endpoint, model))


def _body(prompt: list[int], output_len: int, endpoint: str, model: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": model, "max_tokens": output_len, "ignore_eos": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if endpoint == CHAT:
        return asked | {"messages": [{"role": "user", "content": "".join(_WORDS[i & 1] for i in prompt)}]}
    return asked | {"prompt": prompt}


def _synthetic(seed: int, length: int) -> Callable[[], list[int]]:
    return lambda: np.random.default_rng(seed).integers(0, _IDS, length).tolist()


def _of_trace(request: TraceRequest) -> Callable[[], list[int]]:
    """A trace's ids go beyond any vocabulary: mixed into it, equal prefixes stay equal and others soon part."""

    def prompt() -> list[int]:
        ids = request.prompt().astype(np.uint64)
        ids = (ids ^ (ids >> np.uint64(16))) * np.uint64(0x9E3779B97F4A7C15)
        return (ids >> np.uint64(56)).tolist()

    return prompt
