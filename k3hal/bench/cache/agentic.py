"""A seeded trace of coding agents: one system prompt, long append-only sessions, edits, restarts, fan-outs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3hal.bench.cache.drawing import IdSource, even, in_order
from k3hal.bench.cache.trace import Span, Trace, TraceRequest, ends


@dataclass(frozen=True, slots=True, kw_only=True)
class AgenticShape:
    """Sizes in tokens, drawn evenly between both ends; times in seconds, means of exponentials.

    A turn appends a user's or a tool's message and the answer to it, which the next turn sends again as it was decoded.
    Before a turn, a session starts afresh from the system prompt (`restart`) or changes an earlier message and drops
    what followed (`edit`). After a turn, `fan_out` sends several sub-agents at once, each with the session's history
    and its own task; their reports come back inside the next message.
    """

    sessions: int = 16
    turns: int = 30
    system: tuple[int, int] = (6_000, 12_000)
    message: tuple[int, int] = (300, 6_000)
    answer: tuple[int, int] = (200, 3_000)
    task: tuple[int, int] = (200, 800)
    report: tuple[int, int] = (200, 1_000)
    siblings: tuple[int, int] = (2, 8)
    restart: float = 0.03
    edit: float = 0.07
    fan_out: float = 0.15
    think_seconds: float = 20.0
    start_seconds: float = 60.0
    answer_seconds_per_token: float = 0.01


_MARK = Span(1, 4)
"""What a template puts before an answer: the same tokens at the end of a prompt and within a later one."""


@dataclass(slots=True)
class _Turn:
    """One exchange in a session's history, and the request that decoded its answer."""

    message: Span
    answer: Span
    request: int

    def pieces(self) -> tuple[Span, ...]:
        return (self.message, _MARK, self.answer)


def _request(
    arrival: float, history: tuple[Span, ...], message: Span, answer: Span, last: _Turn | None, group: int | None
) -> TraceRequest:
    """`last` is the turn whose answer ends `history`."""
    pieces = (*history, message, _MARK)
    before = sum(piece.size for piece in history)
    decoded = None if last is None else (before - last.answer.size, before)
    after = None if last is None else last.request
    return TraceRequest(arrival, pieces, answer, ends(pieces)[:-1], after, decoded, group)


def agentic_trace(seed: int, shape: AgenticShape | None = None) -> Trace:
    """The trace of a seed: the same on every machine."""
    shape = shape or AgenticShape()
    rng, ids = np.random.Generator(np.random.PCG64(seed)), IdSource()
    requests: list[TraceRequest] = []
    system = ids.span(even(rng, shape.system))
    for _ in range(shape.sessions):
        _Session(shape, rng, ids, requests, system).run(float(rng.exponential(shape.start_seconds)))
    details: dict[str, object] = {"format": "agentic", "seed": seed, "sessions": shape.sessions, "turns": shape.turns}
    return Trace(f"agentic:{seed}", in_order(requests), details)


class _Session:
    """One agent at work."""

    def __init__(
        self, shape: AgenticShape, rng: np.random.Generator, ids: IdSource, requests: list[TraceRequest], system: Span
    ) -> None:
        self._shape, self._rng, self._ids, self._requests, self._system = shape, rng, ids, requests, system
        self._turns: list[_Turn] = []

    def run(self, clock: float) -> None:
        for _ in range(self._shape.turns):
            self._go_back()
            clock = self._turn(clock)
            if self._rng.random() < self._shape.fan_out:
                clock = self._fan_out(clock)
            clock += float(self._rng.exponential(self._shape.think_seconds))

    def _history(self) -> tuple[Span, ...]:
        return (self._system, *(piece for turn in self._turns for piece in turn.pieces()))

    def _last(self) -> _Turn | None:
        return self._turns[-1] if self._turns else None

    def _go_back(self) -> None:
        """Restart, or drop everything from some earlier message on: the turn that follows replaces that message."""
        draw = self._rng.random()
        if not self._turns:
            return
        if draw < self._shape.restart:
            self._turns.clear()
        elif draw < self._shape.restart + self._shape.edit:
            del self._turns[int(self._rng.integers(len(self._turns))) :]

    def _turn(self, clock: float) -> float:
        """Ask once more; when the answer is complete."""
        message, answer = self._ids.span(even(self._rng, self._shape.message)), self._answer(self._shape.answer)
        self._requests.append(_request(clock, self._history(), message, answer, self._last(), None))
        self._turns.append(_Turn(message, answer, len(self._requests) - 1))
        return clock + answer.size * self._shape.answer_seconds_per_token

    def _fan_out(self, clock: float) -> float:
        """Send sub-agents, all at once; when the last has reported."""
        history, last, longest = self._history(), self._last(), 0
        assert last is not None
        for _ in range(even(self._rng, self._shape.siblings)):
            report = self._answer(self._shape.report)
            task = self._ids.span(even(self._rng, self._shape.task))
            self._requests.append(_request(clock, history, task, report, last, last.request))
            longest = max(longest, report.size)
        return clock + longest * self._shape.answer_seconds_per_token

    def _answer(self, sizes: tuple[int, int]) -> Span:
        return self._ids.span(even(self._rng, sizes))
