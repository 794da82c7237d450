"""A debug engine that replays token ids from a file, to test everything above an engine without a model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from k3hal.engine.interface import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    OutputCallback,
    RequestTiming,
    TokenLogprob,
)
from k3hal.engine.replay_file import ReplayLine, read_replay_file
from k3hal.errors import DrainingError, QueueFullError, RequestError
from k3hal.tokenizer import Tokenizer

DEFAULT_CONTEXT = 1_048_576


@dataclass(slots=True)
class _Running:
    """A request and how far its line has been replayed; `due` is when its next step may come."""

    request: EngineRequest
    line: ReplayLine
    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    due: float = 0.0
    emitted: int = 0


class ReplayEngine:
    """Request number k, counted on arrival, is answered with line k of the file (wrapping around).

    Stop ids, `min_tokens`, `max_tokens` and the context length apply as in a real engine; a line's end finishes with
    `stop`. At most `max_num_seqs` requests run and `max_queue` wait. Log-probabilities are all 0, since a replay is
    certain.
    """

    def __init__(
        self,
        lines: Sequence[ReplayLine],
        tokenizer: Tokenizer,
        *,
        max_model_len: int = DEFAULT_CONTEXT,
        max_num_seqs: int = 256,
        max_queue: int = 1024,
    ) -> None:
        self._lines = lines
        self._info = EngineInfo(
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tuple(sorted(tokenizer.eos_ids)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_model_len,
            max_queue=max_queue,
            device="replay",
        )
        self._lock = threading.Condition()
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        self._aborted: set[str] = set()
        self._arrivals = 0
        self._closing = False
        self._stopped = False
        self._stats = EngineStats()
        self._on_outputs: OutputCallback | None = None
        self._thread = threading.Thread(target=self._loop, name="replay-engine", daemon=True)

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: Tokenizer, **limits: int) -> ReplayEngine:
        """Read `path` (see `replay_file`). Raises `InputError` naming the line that is wrong."""
        return cls(read_replay_file(path, tokenizer.vocab_size), tokenizer, **limits)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, on_outputs: OutputCallback) -> None:
        self._on_outputs = on_outputs
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        length, context = len(request.prompt_token_ids), self._info.max_model_len
        if length == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if length >= context:
            raise RequestError(f"the prompt has {length} tokens, but the context is {context}", param="prompt")
        if not all(0 <= token < self._info.vocab_size for token in request.prompt_token_ids):
            raise RequestError(f"prompt token ids must be below {self._info.vocab_size}", param="prompt")
        with self._lock:
            if self._closing:
                raise DrainingError("the engine is shutting down")
            full = len(self._running) >= self._info.max_num_seqs
            if full and len(self._waiting) >= self._info.max_queue:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already")
            line = self._lines[self._arrivals % len(self._lines)]
            self._arrivals += 1
            self._waiting.append(_Running(request, line, arrival=time.monotonic()))
            self._stats = replace(self._stats, prompt_tokens=self._stats.prompt_tokens + length)
            self._admit()
            self._lock.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            self._aborted.update(request_ids)
            self._lock.notify_all()

    def stats(self) -> EngineStats:
        with self._lock:
            return replace(self._stats, num_running=len(self._running), num_waiting=len(self._waiting))

    def close(self, drain_timeout: float = 0.0) -> None:
        with self._lock:
            self._closing = True
            self._lock.wait_for(lambda: not self._running and not self._waiting, timeout=drain_timeout)
            self._aborted.update(self._running)
            self._aborted.update(item.request.request_id for item in self._waiting)
            self._stopped = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        """One iteration is one step: everything that is due emits, and the callback gets it all at once."""
        assert self._on_outputs is not None
        while True:
            with self._lock:
                while not self._has_work():
                    # Each wake-up asks anew: a submission may have brought the next due time forward.
                    self._lock.wait(self._until_due())
                outputs = self._step(time.monotonic())
                self._lock.notify_all()
                stop = self._stopped and not self._running and not self._waiting
            if outputs:
                self._on_outputs(outputs)
            if stop:
                return

    def _has_work(self) -> bool:
        now = time.monotonic()
        return self._stopped or bool(self._aborted) or any(item.due <= now for item in self._running.values())

    def _until_due(self) -> float | None:
        if not self._running:
            return None
        return max(0.0, min(item.due for item in self._running.values()) - time.monotonic())

    def _admit(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._info.max_num_seqs:
            item = self._waiting.popleft()
            item.scheduled, item.due = now, now + item.line.step_s
            self._running[item.request.request_id] = item

    def _step(self, now: float) -> list[EngineOutput]:
        outputs = self._take_aborted(now)
        for item in [item for item in self._running.values() if item.due <= now]:
            output = self._advance(item, now)
            outputs.append(output)
            if output.finish_reason:
                del self._running[item.request.request_id]
        tokens = sum(len(output.token_ids) for output in outputs)
        self._stats = replace(
            self._stats,
            steps=self._stats.steps + bool(outputs),
            generation_tokens=self._stats.generation_tokens + tokens,
        )
        self._admit()
        return outputs

    def _take_aborted(self, now: float) -> list[EngineOutput]:
        gone = [item for name, item in self._running.items() if name in self._aborted]
        gone += [item for item in self._waiting if item.request.request_id in self._aborted]
        self._waiting = deque(item for item in self._waiting if item.request.request_id not in self._aborted)
        self._running = {name: item for name, item in self._running.items() if name not in self._aborted}
        self._aborted.clear()
        return [
            EngineOutput(item.request.request_id, (), finish_reason="abort", timing=_timing(item, now)) for item in gone
        ]

    def _advance(self, item: _Running, now: float) -> EngineOutput:
        """Replay the next `per_step` tokens of a request, cut where it stops."""
        params, line = item.request.params, item.line
        stops = frozenset(params.stop_token_ids)
        ends = frozenset() if params.ignore_eos else frozenset(self._info.eos_token_ids)
        room = self._info.max_model_len - len(item.request.prompt_token_ids)
        limit = min(room, params.max_tokens) if params.max_tokens is not None else room
        tokens: list[int] = []
        finish: FinishReason | None = None
        matched: int | None = None
        for token in line.ids[item.emitted : item.emitted + line.per_step]:
            tokens.append(token)
            item.emitted += 1
            if token in stops | ends and item.emitted > params.min_tokens:
                finish, matched = "stop", token if token in stops else None
            elif item.emitted >= limit:
                finish = "length"
            if finish:
                break
        if item.emitted >= len(line.ids):
            finish = finish or "stop"
        if tokens and not item.first_token:
            item.first_token = now
        item.due = now + line.step_s
        return EngineOutput(
            item.request.request_id,
            tuple(tokens),
            logprobs=None if params.logprobs is None else tuple(map(_certain(params.logprobs), tokens)),
            finish_reason=finish,
            stop_reason=matched,
            timing=_timing(item, now) if finish else None,
        )


def _certain(alternatives: int) -> Callable[[int], TokenLogprob]:
    return lambda token: TokenLogprob(token, 0.0, ((token, 0.0),) if alternatives else ())


def _timing(item: _Running, now: float) -> RequestTiming:
    return RequestTiming(item.arrival, item.scheduled, item.first_token, now)
