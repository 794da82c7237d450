"""Which prefixes come again, and how soon: learned online from every prefix that came, kept or not.

Time is counted in prompts. A thing that is waited for belongs to a class of things alike. With probability `p`, the
class's own, it comes again; if it does, it waits as long as others did (`Waits`). Both are estimated from what came and
from what has not come yet, each weighed by the share of waits that would be over by now.
"""

from __future__ import annotations

import numpy as np

_AGES = 40
_LEVELS = 24
_EDGES = 2.0 ** (np.arange(_AGES + 1) / 2) - 1
_WIDTHS = np.diff(_EDGES)
_FORGET = 0.99
_PRIOR_CHANCE = 0.3
_PRIOR_WEIGHT = 6.0
_SMOOTH = np.array([0.25, 0.5, 0.25])


def age_of(prompts: np.ndarray) -> np.ndarray:
    """The bin of an age: two bins an octave."""
    return np.minimum((2 * np.log2(1 + np.maximum(prompts, 0))).astype(np.int64), _AGES - 1)


def _stretches(bins: np.ndarray) -> np.ndarray:
    """`[age, end]`: the sum of the bins from each to each later one; elsewhere nothing that means anything."""
    upto = np.cumsum(bins)
    return upto[None] - (upto - bins)[:, None]


_STRETCHES = _stretches(_WIDTHS)
_LATER = np.triu(np.ones((_AGES, _AGES), bool))


class Waits:
    """How long things waited until they came again: those that came once before, and those that came more often.

    Old waits fade with every prompt, as traffic changes.
    """

    def __init__(self) -> None:
        self._counts = np.full((2, _AGES), 0.1)
        self.over = np.zeros((2, _AGES))
        self.index = np.zeros((2, _LEVELS, _AGES))
        self.refresh()

    def fade(self) -> None:
        self._counts *= _FORGET

    def note(self, again: int, prompts: float) -> None:
        self._counts[again, int(age_of(np.array(prompts)))] += 1

    def refresh(self) -> None:
        """Recompute `over` [2, age], the share of waits that end by then, and `index` [2, chance, age].

        An index is the best rate at which a thing of that chance and age can repay its place: the greatest ratio, over
        how much longer one is ready to keep it, of the chance that it comes meanwhile to the time it is kept for that
        (Gittins).
        """
        self._counts += 1e-9
        share = self._counts / self._counts.sum(axis=1, keepdims=True)
        self.over = np.cumsum(share, axis=1)
        smooth = np.stack([np.convolve(np.pad(row, 1, mode="edge"), _SMOOTH, "valid") for row in share])
        smooth /= smooth.sum(axis=1, keepdims=True)
        gone = np.cumsum(smooth, axis=1) - smooth / 2
        chance = np.linspace(0, 1, _LEVELS)[:, None, None]
        for again in range(2):
            # What comes, and the time kept, from each age (rows) to the end of each later bin: sums over a stretch.
            comes = chance * _stretches(smooth[again])
            kept = _STRETCHES - chance * _stretches(_WIDTHS * gone[again])
            self.index[again] = np.where(_LATER, comes / np.maximum(kept, 1e-12), 0.0).max(axis=2)

    def worth(self, chance: np.ndarray, again: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """The index of things of these chances that have waited so long."""
        level = (chance * (_LEVELS - 1) + 0.5).astype(np.int64)
        return self.index[again, level, age_of(prompts)]

    def left(self, chance: float, again: int, prompts: float) -> float:
        """The chance of one thing that has waited so long in vain."""
        over = float(self.over[again, int(age_of(np.array(prompts)))])
        return chance * (1 - over) / max(1 - chance * over, 1e-9)


class ReturnModel:
    """Chances by class, from coarse to fine; a fine class that has seen little says what its coarse one says.

    A class is a number: `buckets**2` of them share a coarsest one and `buckets` the one between. Things waited for are
    rows of columns; at most `limit` at a time.
    """

    def __init__(self, groups: int, buckets: int, limit: int) -> None:
        self.waits = Waits()
        self._sizes = (groups, groups * buckets, groups * buckets * buckets)
        self._buckets = buckets
        self._came = [np.zeros(size) for size in self._sizes]
        self._class = np.zeros(limit, np.int64)
        self._since = np.zeros(limit)
        self._again = np.zeros(limit, np.int64)
        self._live = np.zeros(limit, bool)
        self._free = list(range(limit - 1, -1, -1))
        self.chances = np.zeros(self._sizes[2])
        self.refresh(0.0)

    @property
    def full(self) -> bool:
        return not self._free

    def wait(self, kind: int, *, again: bool, now: float) -> int:
        """Begin to wait for a thing of class `kind`; its row."""
        row = self._free.pop()
        self._class[row], self._again[row], self._since[row], self._live[row] = kind, again, now, True
        return row

    def reclass(self, row: int, kind: int) -> None:
        self._class[row] = kind

    def forget(self, row: int) -> None:
        self._live[row] = False
        self._free.append(row)

    def came(self, row: int, now: float) -> None:
        """What was waited for came; the row stays until it is forgotten."""
        kind = int(self._class[row])
        for came, step in zip(self._came, (self._buckets**2, self._buckets, 1), strict=True):
            came[kind // step] += 1
        self.waits.note(int(self._again[row]), now - self._since[row])

    def state(self, row: int) -> tuple[int, int, float]:
        """Class, whether it came before, and since when it is waited for."""
        return int(self._class[row]), int(self._again[row]), float(self._since[row])

    def refresh(self, now: float) -> None:
        """Estimate everything anew: `chances` float64 [classes], and the waits."""
        self.waits.refresh()
        rows = np.flatnonzero(self._live)
        due = self.waits.over[self._again[rows], age_of(now - self._since[rows])]
        chance = np.full(1, _PRIOR_CHANCE)
        for came, size, step in zip(self._came, self._sizes, (self._buckets**2, self._buckets, 1), strict=True):
            still = np.bincount(self._class[rows] // step, due, size)
            prior = np.repeat(chance, size // chance.size)
            chance = (came + _PRIOR_WEIGHT * prior) / (came + still + _PRIOR_WEIGHT)
        self.chances = chance
