"""What the engine offers to those above it (the Python API, the server) and nothing more.

An engine works on token ids. Text, markup, stop strings and HTTP live above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from k3hal.engine.cache.keys import NO_CONTEXT
from k3hal.engine.cache.keys import PrefixContext as PrefixContext
from k3hal.engine.cache.stats import CacheStats
from k3hal.engine.constraint import Constraint as Constraint
from k3hal.engine.constraint import ConstraintError as ConstraintError
from k3hal.engine.constraint import DeadEndError as DeadEndError
from k3hal.engine.constraint import Matcher as Matcher
from k3hal.engine.tier.interface import TierStats as TierStats
from k3hal.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An encoded image and its place: `tokens` pad tokens stand for it in the prompt, from `position` on.

    Width and height are those of its header, in pixels; it has not been decoded yet. `digest` names its bytes.
    """

    data: bytes
    digest: bytes
    mime: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    width: int
    height: int
    position: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to continue. `n > 1` is several requests; the caller fans out. Lower `priority` numbers go first.

    `context` says which earlier sequences the prompt may share a prefix with, `constraint` which tokens may come.
    `images` are for engines that take them, in the order of the prompt; `context` has their digests too.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    context: PrefixContext = NO_CONTEXT
    constraint: Constraint | None = None
    images: tuple[EngineImage, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the raw model distribution (temperature 1, no penalties).

    `top` holds the `params.logprobs` most likely (token id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Monotonic seconds of a request's life; 0.0 where the point was never reached."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """An increment of one request. Increments of a request arrive in order; the last has a `finish_reason`.

    `token_ids` are the new tokens, a matched stop id included as the last one. `stop_reason` is the stop
    token id that matched, None for the end-of-sequence ids or when nothing matched. `error` is set iff
    `finish_reason == "error"`, and `dead_end` where that is the request's own doing: its constraint allowed no token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    error: str | None = None
    dead_end: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Constant facts about a started engine."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    device: str
    takes_images: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics. Counters only grow.

    `kv_usage` is the share of the cache that running sequences hold, `cached_usage` what is kept for others. `tier` is
    None without an external tier. `dead` says why an engine that failed for good will answer nothing any more.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix: CacheStats = field(default_factory=CacheStats)
    cached_usage: float = 0.0
    tier: TierStats | None = None
    dead: str | None = None


OutputCallback = Callable[[Sequence[EngineOutput]], None]


class Engine(Protocol):
    """The engine's public interface. `on_outputs` runs on the engine's thread, once per step, and must not block."""

    @property
    def info(self) -> EngineInfo: ...

    def start(self, on_outputs: OutputCallback) -> None:
        """Begin serving. Called once."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Thread-safe.

        Raises `RequestError` when it can never run (too long, bad ids), `QueueFullError` when the queue is
        full, `DrainingError` after `close` began.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests within one step; each gets a last output with `finish_reason="abort"`. Ignores unknown ids."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain_timeout` s, abort the rest, release everything."""
        ...
