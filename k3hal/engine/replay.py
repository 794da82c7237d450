"""A debug engine that replays token ids from a file, to test everything above an engine without a model."""

from __future__ import annotations

import heapq
import itertools
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
from k3hal.engine.replay_file import TELL_IMAGES, ReplayLine, read_replay_file
from k3hal.errors import DrainingError, QueueFullError, RequestError
from k3hal.tokenizer import Tokenizer

DEFAULT_CONTEXT = 1_048_576

# Seconds from a step to the next one, never more than half of a line's own: as in an engine, what falls into one step
# is handed over together. Woken for each token, the replay would take more time than a server takes for the tokens.
_STEP_S = 0.005


@dataclass(slots=True)
class _Running:
    """A request and how far its line has been replayed; `due` is when its next step may come.

    Its turns are `step_s` apart whatever the steps before took, so that late steps do not slow the pace.
    """

    request: EngineRequest
    line: ReplayLine
    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    due: float = 0.0
    emitted: int = 0
    ends: frozenset[int] = frozenset()
    limit: int = 0


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
        takes_images: bool = False,
    ) -> None:
        """With `takes_images` requests may have some, which change nothing about what is replayed."""
        self._lines = lines
        self._info = EngineInfo(
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tuple(sorted(tokenizer.eos_ids)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_model_len,
            max_queue=max_queue,
            device="replay",
            takes_images=takes_images,
        )
        self._lock = threading.Condition()
        self._waiting: deque[_Running] = deque()
        self._running: dict[str, _Running] = {}
        # Every running request once, by when it is due; those that were aborted leave when they come up.
        self._turns: list[tuple[float, int, _Running]] = []
        self._numbers = itertools.count()
        self._stepped = 0.0
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
        file = read_replay_file(path, tokenizer.vocab_size)
        return cls(file.lines, tokenizer, **limits, takes_images=file.takes_images)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def start(self, on_outputs: OutputCallback) -> None:
        self._on_outputs = on_outputs
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        length, context = len(request.prompt_token_ids), self._info.max_model_len
        if request.images and not self._info.takes_images:
            raise RequestError("the replay takes text only", hint=TELL_IMAGES, param="messages")
        if length == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if length >= context:
            raise RequestError(f"the prompt has {length} tokens, but the context is {context}", param="prompt")
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self._info.vocab_size:
            raise RequestError(f"prompt token ids must be below {self._info.vocab_size}", param="prompt")
        with self._lock:
            if self._closing:
                raise DrainingError("the engine is shutting down")
            full = len(self._running) >= self._info.max_num_seqs
            if full and len(self._waiting) >= self._info.max_queue:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already")
            line = self._lines[self._arrivals % len(self._lines)]
            self._arrivals += 1
            self._waiting.append(self._received(request, line))
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
        return self._stopped or bool(self._aborted) or self._until_due() == 0.0

    def _until_due(self) -> float | None:
        """Seconds to the step in which the next turn falls; None where nothing runs."""
        if not self._turns:
            return None
        due, _, item = self._turns[0]
        step = max(due, self._stepped + min(_STEP_S, item.line.step_s / 2))
        return max(0.0, step - time.monotonic())

    def _received(self, request: EngineRequest, line: ReplayLine) -> _Running:
        """A new request with what can be said now about where it ends."""
        params = request.params
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self._info.eos_token_ids)
        room = self._info.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        return _Running(request, line, arrival=time.monotonic(), ends=ends, limit=limit)

    def _admit(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._info.max_num_seqs:
            item = self._waiting.popleft()
            item.scheduled = item.due = now
            self._running[item.request.request_id] = item
            self._take_turn(item)

    def _take_turn(self, item: _Running) -> None:
        item.due += item.line.step_s
        heapq.heappush(self._turns, (item.due, next(self._numbers), item))

    def _step(self, now: float) -> list[EngineOutput]:
        outputs = self._take_aborted(now)
        due: list[_Running] = []
        while self._turns and self._turns[0][0] <= now:
            due.append(heapq.heappop(self._turns)[2])
        for item in due:
            name = item.request.request_id
            if self._running.get(name) is not item:
                continue
            output = self._advance(item, now)
            outputs.append(output)
            if output.finish_reason:
                del self._running[name]
            else:
                self._take_turn(item)
        tokens = sum(len(output.token_ids) for output in outputs)
        self._stepped = now
        self._stats = replace(
            self._stats,
            steps=self._stats.steps + bool(outputs),
            generation_tokens=self._stats.generation_tokens + tokens,
        )
        self._admit()
        return outputs

    def _take_aborted(self, now: float) -> list[EngineOutput]:
        if not self._aborted:
            return []
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
        tokens: list[int] = []
        finish: FinishReason | None = None
        matched: int | None = None
        for token in line.ids[item.emitted : item.emitted + line.per_step]:
            tokens.append(token)
            item.emitted += 1
            if token in item.ends and item.emitted > params.min_tokens:
                finish, matched = "stop", token if token in params.stop_token_ids else None
            elif item.emitted >= item.limit:
                finish = "length"
            if finish:
                break
        if item.emitted >= len(line.ids):
            finish = finish or "stop"
        if tokens and not item.first_token:
            item.first_token = now
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
