"""How fast requests end: what to tell those who have to wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SHORTEST, LONGEST = 1.0, 60.0
"""Seconds: a client is never told to come back sooner, or later."""

_KEPT = 256
_WINDOW = 60.0


class Pace:
    """The ends of the last requests since there was nothing to do, at most a minute of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_KEPT)
        self._since = clock()

    def began(self) -> None:
        """There is something to do again."""
        self._ends.clear()
        self._since = self._clock()

    def ended(self) -> None:
        """One request less."""
        if len(self._ends) == _KEPT:
            self._since = self._ends[0]
        self._ends.append(self._clock())

    def until(self, number: int) -> float:
        """Seconds until `number` more will have ended, if they go on as they did.

        While none has ended, as long again as that took so far.
        """
        now = self._clock()
        while self._ends and self._ends[0] < now - _WINDOW:
            self._since = self._ends.popleft()
        seconds = now - self._since
        if self._ends:
            seconds *= number / len(self._ends)
        return min(max(seconds, SHORTEST), LONGEST)
