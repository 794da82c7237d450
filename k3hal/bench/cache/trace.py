"""Traces of requests: who asks what and when, tokens expanded only when a request is replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """`size` tokens with the ids `start`, `start + 1`, ...: equal spans are equal text, and other spans differ."""

    start: int
    size: int

    def tokens(self) -> np.ndarray:
        return np.arange(self.start, self.start + self.size, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace.

    `arrival` in seconds. The prompt is the concatenation of `pieces`; the engine will sample exactly the tokens of
    `output`. `boundaries` are prompt positions where a message, a tool result or a role ends, ascending. The prompt's
    tokens `answer[0]` to `answer[1]` are what request `after` decoded, at the same positions and behind the same
    prefix, so that a cache may have kept them; `after` is the index in the trace of a request that must have finished
    before this one can be sent. `group` names requests that only differ in their last pieces (a fan-out).
    """

    arrival: float
    pieces: tuple[Span, ...]
    output: Span
    boundaries: tuple[int, ...] = ()
    after: int | None = None
    answer: tuple[int, int] | None = None
    group: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(piece.size for piece in self.pieces)

    def prompt(self) -> np.ndarray:
        """Token ids of the prompt, int64 `[prompt_tokens]`."""
        return np.concatenate([piece.tokens() for piece in self.pieces])


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; `name` is how the command line called it."""

    name: str
    requests: Sequence[TraceRequest]
    details: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.output.size for request in self.requests)

    def head(self, count: int | None) -> Trace:
        """The first `count` requests; all of them for None."""
        return self if count is None else Trace(self.name, self.requests[:count], self.details)


def ends(pieces: Sequence[Span]) -> tuple[int, ...]:
    """Where each piece ends in their concatenation."""
    return tuple(accumulate(piece.size for piece in pieces))
