"""The prefixes that a policy waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.cache.policy import Kind


@dataclass(slots=True)
class Place:
    """A prefix that may come again: `end` tokens, taken for `kind`, begun with `uses` times since.

    `floor` names its whole units. `prompt` is the length of the prompt it was noted with, and `follows` says how often
    the place which that prompt began with had come before: 0 when it began with none, 1 when it was the first to come
    back there, 2 when others had. `row` is the return model's, `entry` its snapshot's in the table or -1.
    """

    name: bytes
    floor: bytes
    end: int
    kind: Kind
    uses: int
    prompt: int
    follows: int
    row: int = -1
    entry: int = -1


class Places:
    """The most recent prefixes, by name; the oldest are forgotten when there are `limit`."""

    def __init__(self, limit: int = 1 << 15) -> None:
        self._limit = limit
        self._by_name: dict[bytes, Place] = {}
        self._tails: dict[bytes, list[Place]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def oldest(self) -> Place:
        return next(iter(self._by_name.values()))

    def get(self, name: bytes) -> Place | None:
        return self._by_name.get(name)

    def add(self, place: Place) -> None:
        """Remember a prefix, in place of one of the same name."""
        self.drop(place.name)
        self._by_name[place.name] = place
        if place.name != place.floor:
            self._tails.setdefault(place.floor, []).append(place)

    def drop(self, name: bytes) -> None:
        place = self._by_name.pop(name, None)
        if place is not None and name != place.floor:
            tails = self._tails[place.floor]
            tails.remove(place)
            if not tails:
                del self._tails[place.floor]

    def deepest(self, names: PrefixNames, limit: int) -> Place | None:
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

    def _ending_after(self, floor: bytes, limit: int) -> Iterator[Place]:
        tails = self._tails.get(floor)
        if tails:
            yield from sorted((tail for tail in tails[-8:] if tail.end <= limit), key=lambda tail: -tail.end)
