"""Text of one channel on its way to the client: stop strings applied, log-probabilities kept in step with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from k3hal.engine.interface import TokenLogprob
from k3hal.engine.stop_strings import StopStrings


class StoppableText:
    """Releases text that no stop string can still claim, and each token's log-probability once its text is released.

    A token is released with the last character it contributed; of a token cut by a stop string, with what is left.
    """

    __slots__ = ("_entered", "_pending", "_released", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = StopStrings(stops, include=include)
        self._pending: deque[tuple[int, int, TokenLogprob]] = deque()
        self._entered = 0
        self._released = 0

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def feed(self, text: str, logprob: TokenLogprob | None = None, *, armed: bool = True) -> str:
        """Take a token's text. While not `armed` everything passes, so that no stop string matches."""
        if logprob is not None:
            self._pending.append((self._entered, self._entered + len(text), logprob))
        self._entered += len(text)
        shown = self._stops.feed(text) if armed else self._stops.flush() + text
        self._released += len(shown)
        return shown

    def flush(self) -> str:
        text = self._stops.flush()
        self._released += len(text)
        return text

    def logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities whose text has been released since the last call."""
        out: list[TokenLogprob] = []
        cut = self._stops.matched is not None
        while self._pending:
            start, end, logprob = self._pending[0]
            if not (end <= self._released or (cut and start < self._released)):
                break
            out.append(logprob)
            self._pending.popleft()
        if cut:
            self._pending.clear()
        return out
