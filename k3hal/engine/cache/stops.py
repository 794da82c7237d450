"""Where each row's prompt stops on its way, so that the state there can be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from k3hal.engine.cache.interface import NEVER
from k3hal.engine.cache.policy import Kind, Stop


class RowStops:
    """The stops of every row. `next` int64 [rows] is each one's next, `NEVER` where there is none.

    A prompt is computed to `progress` tokens once the planned step has run; up to there no stop can be added any more.
    """

    def __init__(self, max_rows: int) -> None:
        self.next = np.full(max_rows, NEVER, np.int64)
        self._progress = np.zeros(max_rows, np.int64)
        self._goal = np.zeros(max_rows, np.int64)
        self._stops: list[list[Stop]] = [[] for _ in range(max_rows)]

    def begin(self, row: int, cached: int, num_tokens: int, wished: Iterable[Stop]) -> None:
        """A row's prompt of `num_tokens` is computed from `cached` on; wishes elsewhere are ignored."""
        kinds = {stop.position: stop for stop in wished if cached < stop.position < num_tokens}
        self._stops[row] = [kinds[position] for position in sorted(kinds, reverse=True)]
        self._progress[row], self._goal[row] = cached, num_tokens

    def end(self, row: int) -> None:
        self.next[row] = NEVER
        self._progress[row] = self._goal[row] = 0
        self._stops[row] = []

    def under_way(self) -> list[int]:
        """Rows whose prompts are not planned to their ends yet."""
        return np.flatnonzero(self._progress < self._goal).tolist()

    def goal(self, row: int) -> int:
        return int(self._goal[row])

    def chunk_end(self, row: int, start: int, end: int) -> tuple[int, bool]:
        """Where a chunk ends that may go to `end`, and whether a stop cut it short."""
        stop = int(self.next[row])
        cut = start < stop < end
        self._progress[row] = stop if cut else end
        return int(self._progress[row]), cut

    def due(self, row: int, position: int) -> int:
        """The last stop at or before `position` that the row still comes to, made there if it can be; 0 without."""
        stops = self._stops[row]
        if position > self._progress[row] and all(stop.position != position for stop in stops):
            stops.append(Stop(position, Kind.AWAITED))
            stops.sort(key=lambda stop: -stop.position)
            self.next[row] = min(int(self.next[row]), position)
        return max((stop.position for stop in stops if stop.position <= position), default=0)

    def kind(self, row: int, position: int) -> Kind:
        """What the state at a stop that is reached is kept for."""
        stops = self._stops[row]
        return stops[-1].kind if stops and stops[-1].position == position else Kind.INTERVAL

    def arm(self, row: int, position: int, after: Callable[[int], int | None]) -> None:
        """Set the next stop after `position`; beyond the prompt it is `after(position)`."""
        stops = self._stops[row]
        while stops and stops[-1].position <= position:
            stops.pop()
        following = stops[-1].position if stops else after(position)
        self.next[row] = NEVER if following is None else following
