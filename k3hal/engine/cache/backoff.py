"""How far before its end a prompt's state is best kept: learned from where prompts left those before them."""

from __future__ import annotations

import numpy as np

_DISTANCES = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64])
_REMEMBERED = 600
_RECENT = 200
_SECOND_GAIN = 0.08
"""Share of the tokens that a second place must add to be worth a snapshot."""

_FIRST_GUESS_FROM = 16


class BackOff:
    """Distances in match units. A prompt that is asked about in other words leaves it a little before its end: a state
    kept there serves both at the cost of the few units between."""

    def __init__(self) -> None:
        self._parted: list[tuple[int, int, int]] = []
        self._chosen: dict[int, list[int]] = {}

    def note(self, units: int, parted: int) -> None:
        """A prompt began like the first `parted` units of one of `units` units that nothing else had begun like yet."""
        self._parted.append((units.bit_length(), units, units - parted))
        del self._parted[:-_REMEMBERED]
        self._chosen.clear()

    def distances(self, units: int) -> list[int]:
        """One distance, or two where both are worth it, for a new prompt of that length, the better one first.

        They are those that would have saved most of what lately parted from prompts about as long.
        """
        size = units.bit_length()
        if size not in self._chosen:
            near = [event for event in self._parted if abs(event[0] - size) <= 1] or self._parted
            self._chosen[size] = _best(np.array(near[-_RECENT:])) if near else []
        return self._chosen[size] or ([0, 4] if units >= _FIRST_GUESS_FROM else [0])


def _best(events: np.ndarray) -> list[int]:
    """`events` int64 [N, 3]: size class, units, and units after the place of parting."""
    units, rest = events[:, 1], events[:, 2]
    saved = np.where(rest <= _DISTANCES[:, None], np.maximum(units - _DISTANCES[:, None], 0), 0)
    first = int(saved.sum(axis=1).argmax())
    both = np.maximum(saved, saved[first]).sum(axis=1)
    second = int(both.argmax())
    if both[second] - saved[first].sum() < _SECOND_GAIN * units.sum():
        return [int(_DISTANCES[first])]
    return [int(_DISTANCES[first]), int(_DISTANCES[second])]
