"""Which prefixes come again, and how soon: learned from what came, whether or not it was kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3hal.engine.cache.keys import PrefixNames


class ReuseOdds:
    """How often things with certain features come again: naive Bayes over counts.

    A feature is a small integer. A thing's first one is the population that its later ones, from the third on, are
    judged against; the second is its group in the population, whose rate is where the estimate starts.
    """

    def __init__(self, num_features: int) -> None:
        self._noted = [0.0] * num_features
        self._came = [0.0] * num_features

    def count(self, features: Sequence[int]) -> None:
        """One thing more, of which it is not known that it came again."""
        for feature in features:
            self._noted[feature] += 1.0

    def came(self, features: Sequence[int]) -> None:
        """One that was counted came again."""
        for feature in features:
            self._came[feature] += 1.0

    def probability(self, features: Sequence[int]) -> float:
        """That a thing with these features comes again. Few counts say little: they start from what is more general.

        Features overlap in what they say, hence less than the full weight for each.
        """
        population, group, *others = features
        rate = (self._came[population] + 0.5) / (self._noted[population] + 2.0)
        usual = _log_odds(rate)
        total = _log_odds(self._near(group, rate))
        for feature in others:
            total += 0.8 * (_log_odds(self._near(feature, rate)) - usual)
        return 1.0 / (1.0 + math.exp(-min(max(total, -9.0), 4.0)))

    def _near(self, feature: int, rate: float) -> float:
        """A feature's rate, drawn towards a more general one as if that had been seen four times."""
        return (self._came[feature] + 4.0 * rate) / (self._noted[feature] + 4.0)


def _log_odds(rate: float) -> float:
    rate = min(max(rate, 1e-4), 1.0 - 1e-4)
    return math.log(rate / (1.0 - rate))


@dataclass(slots=True)
class Prospect:
    """A prefix that may come again. `interval` seconds pass until then if it does; `since` is when it last came.

    `kind` and `level` say what place it is. `entry` is its snapshot's in the table, -1 without one.
    `counted` says whether the odds know of it.
    """

    name: bytes
    floor: bytes
    end: int
    kind: int
    level: int
    uses: int
    features: tuple[int, ...]
    probability: float
    interval: float
    since: float
    entry: int = -1
    counted: bool = False


class Prospects:
    """The most recent prefixes, by name; the oldest are forgotten when there are `limit`."""

    def __init__(self, limit: int = 1 << 15) -> None:
        self._limit = limit
        self._by_name: dict[bytes, Prospect] = {}
        self._tails: dict[bytes, list[Prospect]] = {}

    def oldest(self) -> Prospect:
        return next(iter(self._by_name.values()))

    def get(self, name: bytes) -> Prospect | None:
        return self._by_name.get(name)

    def add(self, prospect: Prospect) -> None:
        """Remember a prefix, in place of one of the same name."""
        self.drop(prospect.name)
        self._by_name[prospect.name] = prospect
        if prospect.name != prospect.floor:
            self._tails.setdefault(prospect.floor, []).append(prospect)
        if len(self._by_name) > self._limit:
            self.drop(next(iter(self._by_name)))

    def drop(self, name: bytes) -> None:
        prospect = self._by_name.pop(name, None)
        if prospect is not None and name != prospect.floor:
            tails = self._tails[prospect.floor]
            tails.remove(prospect)
            if not tails:
                del self._tails[prospect.floor]

    def deepest(self, names: PrefixNames, limit: int) -> Prospect | None:
        """The longest remembered prefix, of at most `limit` tokens, of a sequence."""
        for units in range(limit // names.unit, -1, -1):
            floor = names.whole(units)
            for tail in self._ending_after(floor, limit):
                if names.at(tail.end) == tail.name:
                    return tail
            found = self._by_name.get(floor)
            if found is not None:
                return found
        return None

    def _ending_after(self, floor: bytes, limit: int) -> Iterator[Prospect]:
        tails = self._tails.get(floor)
        if tails:
            yield from sorted((tail for tail in tails[-8:] if tail.end <= limit), key=lambda tail: -tail.end)
