"""The default retention policy: keep what is expected to repay its memory soonest, by what it learns of returns."""

from __future__ import annotations

import numpy as np

from k3hal.engine.cache.backoff import BackOff
from k3hal.engine.cache.keys import DIGEST_BYTES, PrefixNames
from k3hal.engine.cache.places import Place, Places
from k3hal.engine.cache.policy import Kind, PromptFacts, Stop
from k3hal.engine.cache.returns import ReturnModel
from k3hal.engine.cache.snapshots import NONE, SnapshotTable

_BUCKETS = 22
_STANDINGS = 5
_REMEMBERED = 1 << 14
_REFRESH = 16
"""Prompts between two estimates."""

_LEAST_GAIN = 8.0
"""Expected tokens saved below which a chunk is not split."""

_LEAST_SPACING_GAIN = 512.0
_SPACING_FROM = 2048
"""Tokens between a snapshot for spacing and what is known before it."""

_REMEMBERS_PRESSURE = 256
"""Prompts for which memory counts as short after something was given up."""

_CERTAIN, _UNKNOWN = -1, -2
_UNKNOWN_CHANCE = 0.02
_MOST_INHERITED = 0.95


class CostAware:
    """Snapshots where prompts are expected to part or to be continued.

    Worth is the index of the return model (chance to come again, over the time kept until then) times the tokens that
    would be computed anew without the snapshot, per page that giving it up frees. Classes of places are kinds by
    standing (uses so far; for a new place, what its prompt followed: the second question on a document is hardly ever
    continued, the second turn of a chat is), then by the length of the answer (short answers to long prompts come
    again), then of the prompt. When a snapshot goes, the nearest one before it inherits its chance: those prompts would
    start there.
    """

    name = "cost"
    shares = True

    def __init__(self) -> None:
        self._places = Places()
        self._model = ReturnModel(len(Kind) * _STANDINGS, _BUCKETS, _REMEMBERED + 2)
        self._back_off = BackOff()
        self._prompts = 0
        self._pressed = -_REMEMBERS_PRESSURE
        self._class = np.zeros(0, np.int64)
        self._again = np.zeros(0, np.int64)
        self._since = np.zeros(0)
        self._inherited = np.zeros(0)

    def stops(self, facts: PromptFacts) -> list[Stop]:
        self._prompts += 1
        self._model.waits.fade()
        if self._prompts % _REFRESH == 0:
            self._model.refresh(self._prompts)
        seen = min(max(facts.matched, facts.seen), facts.last)
        known = self._places.deepest(facts.names, min(facts.num_tokens - 1, seen + facts.unit))
        if facts.donor and (facts.donor - 1) // facts.unit >= seen // facts.unit:
            self._back_off.note((facts.donor - 1) // facts.unit, seen // facts.unit)
        if known is not None:
            self._model.came(known.row, self._prompts)
        follows = 0 if known is None else min(known.uses + 1, 2)
        wishes = self._wishes(facts, known, seen)
        found = [self._note(facts, at, kind, uses, follows) for at, (kind, uses) in wishes.items()]
        stops = [Stop(place.end, place.kind) for place in found if self._pays(place, facts.cached)]
        if self._prompts - self._pressed > _REMEMBERS_PRESSURE:
            # Memory is plenty: the same prompt again shall hit to its end.
            stops.append(Stop(facts.last, Kind.PROMPT_END))
        return stops

    def next_decode_stop(self, position: int, unit: int) -> int | None:
        return None

    def keeps_end(self, num_tokens: int, *, preempted: bool) -> bool:
        return True

    def ending(self, table: SnapshotTable, facts: PromptFacts, whole: PrefixNames, num_tokens: int) -> None:
        output = max(num_tokens - facts.num_tokens, 0) + 1
        for place in facts.memo:
            if self._places.get(place.name) is place:
                self._model.reclass(place.row, _class(place, output))
                self._tell(table, place)
        name = whole.at(num_tokens)
        if self._places.get(name) is None:
            follows = facts.memo[0].follows if facts.memo else 0
            self._add(self._place(name, whole, num_tokens, Kind.SEQUENCE_END, 0, facts.num_tokens, follows), output)

    def added(self, table: SnapshotTable, entry: int, name: bytes) -> None:
        self._grow(table)
        place = self._places.get(name)
        certain = table.kind[entry] in (Kind.PREEMPTED, Kind.AWAITED)
        if certain or place is None:
            self._class[entry] = _CERTAIN if certain else _UNKNOWN
            self._again[entry], self._since[entry], self._inherited[entry] = 0, self._prompts, 0.0
        else:
            self._take(entry, place)

    def reused(self, table: SnapshotTable, entry: int, now: float) -> None:
        self._grow(table)
        node = table.nodes[entry]
        assert node is not None
        place = self._places.get(node.digests[-DIGEST_BYTES:])
        if place is not None:
            self._take(entry, place)

    def scores(self, table: SnapshotTable, entries: np.ndarray, now: float) -> np.ndarray:
        self._grow(table)
        waited = self._prompts - self._since[entries]
        index = self._model.waits.worth(self._chance(entries), self._again[entries], waited)
        return index * table.gap[entries] / (table.run + table.kv_pages[entries])

    def dropped(self, table: SnapshotTable, entry: int, now: float) -> None:
        """Its place is waited for as before: what comes without it teaches as much."""
        self._pressed = self._prompts
        heir = int(table.parent[entry])
        if heir != NONE:
            chance, waited = float(self._chance(np.array([entry]))[0]), self._prompts - self._since[entry]
            left = self._model.waits.left(chance, int(self._again[entry]), waited)
            self._inherited[heir] = min(1 - (1 - self._inherited[heir]) * (1 - left), _MOST_INHERITED)

    def _chance(self, entries: np.ndarray) -> np.ndarray:
        """That a prompt starts from each of these: its place's chance, and what it inherited."""
        kinds = self._class[entries]
        own = np.where(kinds >= 0, self._model.chances[kinds], np.where(kinds == _CERTAIN, 1.0, _UNKNOWN_CHANCE))
        return 1 - (1 - own) * (1 - self._inherited[entries])

    def _wishes(self, facts: PromptFacts, known: Place | None, seen: int) -> dict[int, tuple[Kind, int]]:
        """Places worth watching, by position, the surest kind of each."""
        wishes: dict[int, tuple[Kind, int]] = {}
        if known is not None:
            ended = known.kind == Kind.SEQUENCE_END
            wishes[known.end] = (Kind.JUNCTION if ended else known.kind, known.uses + 1)
        if seen > (known.end if known else 0):
            wishes[seen] = (Kind.JUNCTION, 1)
        units = facts.last // facts.unit
        for distance in self._back_off.distances(units):
            kind = Kind.NEAR_END if distance else Kind.PROMPT_END
            wishes.setdefault((units - distance) * facts.unit, (kind, 0))
        # A message end just after a known place is that place for every purpose, and would take its returns from it.
        start = max(facts.cached, known.end if known else 0) + facts.unit
        ahead = [at for at in facts.boundaries if start <= at < facts.num_tokens]
        for at in (*ahead[:2], *ahead[-2:]):
            wishes.setdefault(at, (Kind.BOUNDARY, 0))
        place = (start + facts.last) // 2
        while place - start >= _SPACING_FROM:
            wishes.setdefault(place // facts.unit * facts.unit, (Kind.SPACING, 0))
            place = (start + place) // 2
        return {at: wish for at, wish in wishes.items() if 0 < at < facts.num_tokens}

    def _note(self, facts: PromptFacts, position: int, kind: Kind, uses: int, follows: int) -> Place:
        name = facts.names.at(position)
        place = self._place(name, facts.names, position, kind, uses, facts.num_tokens, follows)
        self._add(place, 0)
        facts.memo.append(place)
        return place

    def _place(
        self, name: bytes, names: PrefixNames, position: int, kind: Kind, uses: int, prompt: int, follows: int
    ) -> Place:
        return Place(name, names.whole(position // names.unit), position, kind, uses, prompt, follows)

    def _add(self, place: Place, output: int) -> None:
        """Watch a prefix, instead of any of the same name."""
        old = self._places.get(place.name)
        if old is not None:
            place.entry = old.entry
            self._forget(old)
        elif self._model.full:
            self._forget(self._places.oldest())
        place.row = self._model.wait(_class(place, output), again=place.uses > 0, now=self._prompts)
        self._places.add(place)

    def _forget(self, place: Place) -> None:
        self._places.drop(place.name)
        self._model.forget(place.row)

    def _pays(self, place: Place, cached: int) -> bool:
        """Whether a snapshot there is expected to save enough tokens."""
        chance = float(self._model.chances[self._model.state(place.row)[0]])
        return chance * (place.end - cached) >= (_LEAST_SPACING_GAIN if place.kind == Kind.SPACING else _LEAST_GAIN)

    def _tell(self, table: SnapshotTable, place: Place) -> None:
        """Let the snapshot of a place know of its new class, if there is one."""
        node = table.nodes[place.entry] if place.entry >= 0 else None
        if node is not None and node.digests[-DIGEST_BYTES:] == place.name:
            self._take(place.entry, place)

    def _take(self, entry: int, place: Place) -> None:
        place.entry = entry
        self._class[entry], self._again[entry], self._since[entry] = self._model.state(place.row)
        self._inherited[entry] = 0.0

    def _grow(self, table: SnapshotTable) -> None:
        more = table.live.size - self._class.size
        if more > 0:
            self._class = np.concatenate((self._class, np.full(more, _UNKNOWN)))
            self._again = np.concatenate((self._again, np.zeros(more, np.int64)))
            self._since = np.concatenate((self._since, np.zeros(more)))
            self._inherited = np.concatenate((self._inherited, np.zeros(more)))


def _class(place: Place, output: int) -> int:
    """`output` 0 means that it is not known yet."""
    standing = min(place.uses, 2) + 2 if place.uses else place.follows
    group = int(place.kind) * _STANDINGS + standing
    lengths = [min(length.bit_length(), _BUCKETS - 1) for length in (output, place.prompt)]
    return (group * _BUCKETS + lengths[0]) * _BUCKETS + lengths[1]
