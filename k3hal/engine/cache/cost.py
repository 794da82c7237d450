"""The default retention policy: keep what saves the most computing per byte, by what it learns of reuse."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from k3hal.engine.cache.keys import DIGEST_BYTES, PrefixNames
from k3hal.engine.cache.policy import Kind, PromptFacts, Stop
from k3hal.engine.cache.reuse import Prospect, Prospects, ReuseOdds
from k3hal.engine.cache.snapshots import NONE, SnapshotTable

_ENDS = (Kind.PROMPT_END, Kind.NEAR_END, Kind.SEQUENCE_END)
_FIRST_INTERVAL = 60.0
_LEARNING_RATE = 0.05
_PATIENCE = 0.6
"""Intervals after which a prefix that did not come again is counted as one that did not."""
_FADING = 0.98
"""What is left of the price at the next prompt when nothing has to be given up."""
_LEAST_GAIN = 8.0
"""Expected tokens saved below which a chunk is not split for a snapshot."""
_SPACING_FROM = 2048
_KINDS, _BUCKETS = len(Kind), 20


class CostAware:
    """Snapshots where prompts are likely to part or to be continued, weighed by learned odds.

    The worth of a snapshot is the rate at which it is expected to be used (the chance that it comes again, which fades
    as time passes without it, over the time that takes), times the tokens that would be computed anew without it, per
    page that giving it up frees. What of a prompt comes again, and how soon, is learned from all prompts, also where
    nothing was kept: from where the position lies (its kind and its alignment), how often the prefix has come before,
    its length, the tokens after it and the length of the answer. When a snapshot goes, the nearest one before it
    inherits its chances, as those prompts would then start there.
    """

    name = "cost"
    shares = True

    def __init__(self) -> None:
        self._odds = ReuseOdds(_KINDS * (2 + 6 * _BUCKETS + 120))
        self._prospects = Prospects()
        self._open: deque[Prospect] = deque()
        self._price = 0.0
        self._interval = np.full((_KINDS, 2), _FIRST_INTERVAL)

    def stops(self, table: SnapshotTable, facts: PromptFacts) -> list[Stop]:
        self._count_old(facts.now)
        known = self._prospects.deepest(facts.names, facts.num_tokens - 1)
        start = 0
        if known is not None:
            start = known.end
            self._came(known, facts)
        found: list[Prospect] = []
        for position, (kind, level) in self._candidates(facts, known).items():
            name = facts.names.at(position)
            prospect = self._prospects.get(name)
            if prospect is None:
                new = max(position - start, 0)
                prospect = self._note(facts.names, name, position, kind, level, 0, new, facts.now)
                facts.memo.append(prospect)
            found.append(prospect)
        self._price *= _FADING
        return self._worth_a_stop(found, facts.cached, table)

    def next_decode_stop(self, position: int, unit: int) -> int | None:
        return None

    def keeps_end(self, num_tokens: int, *, preempted: bool) -> bool:
        return True

    def ending(self, table: SnapshotTable, facts: PromptFacts, whole: PrefixNames, num_tokens: int) -> None:
        output = max(num_tokens - facts.num_tokens, 0)
        for prospect in facts.memo:
            if prospect.uses == 0 and prospect.kind in _ENDS:
                self._add_feature(prospect, _feature(prospect.kind, 4, output))
                self._refresh(table, prospect)
        name = whole.at(num_tokens)
        if self._prospects.get(name) is None:
            new = num_tokens - facts.cached
            prospect = self._note(whole, name, num_tokens, Kind.SEQUENCE_END, 0, 0, new, facts.now)
            self._add_feature(prospect, _feature(Kind.SEQUENCE_END, 4, output))

    def added(self, table: SnapshotTable, entry: int, name: bytes) -> None:
        prospect = self._prospects.get(name)
        if table.kind[entry] in (Kind.PREEMPTED, Kind.AWAITED):
            # Somebody waits for it.
            table.chance[entry], table.interval[entry] = 1.0, 1.0
        elif prospect is not None:
            self._take(table, entry, prospect)

    def reused(self, table: SnapshotTable, entry: int, now: float) -> None:
        node = table.nodes[entry]
        assert node is not None
        prospect = self._prospects.get(node.digests[-DIGEST_BYTES:])
        if prospect is not None:
            self._take(table, entry, prospect)

    def scores(self, table: SnapshotTable, entries: np.ndarray, now: float) -> np.ndarray:
        interval = table.interval[entries]
        left = table.chance[entries] * np.exp((table.since[entries] - now) / interval)
        chance = left / (1.0 - table.chance[entries] + left + 1e-12)
        return chance / interval * table.gap[entries] / (table.run + table.kv_pages[entries])

    def dropped(self, table: SnapshotTable, entry: int, now: float) -> None:
        self._price += _LEARNING_RATE * (float(table.score[entry]) - self._price)
        heir = int(table.parent[entry])
        if heir == NONE:
            return
        mine, its = _chance_now(table, entry, now), _chance_now(table, heir, now)
        if mine / table.interval[entry] > its / table.interval[heir]:
            table.interval[heir] = table.interval[entry]
        table.chance[heir] = min(1.0 - (1.0 - mine) * (1.0 - its), 0.99)
        table.since[heir] = now

    def _came(self, prospect: Prospect, facts: PromptFacts) -> None:
        """A remembered prefix came again: learn from it, and expect it once more."""
        self._count(prospect)
        self._odds.came(prospect.features)
        kind, waited = prospect.kind, facts.now - prospect.since
        mean = self._interval[kind]
        # Of a prefix that comes all the time every further wait says less about the others.
        mean[min(prospect.uses, 1)] += _LEARNING_RATE / max(prospect.uses, 1) * (waited - mean[min(prospect.uses, 1)])
        after = facts.num_tokens - prospect.end
        self._note(facts.names, prospect.name, prospect.end, kind, prospect.level, prospect.uses + 1, after, facts.now)

    def _note(
        self,
        names: PrefixNames,
        name: bytes,
        position: int,
        kind: int,
        level: int,
        uses: int,
        new: int,
        now: float,
    ) -> Prospect:
        again = int(uses > 0)
        units, rest = divmod(position, names.unit)
        alignment = 4 if rest else min((units & -units).bit_length() - 1, 3)
        features = (
            kind * 2 + again,
            _KINDS * (2 + 6 * _BUCKETS) + ((kind * 4 + level) * 5 + alignment) * 6 + min(_bucket(uses), 5),
            _feature(kind, again, position),
            _feature(kind, 2 + again, new),
        )
        prospect = Prospect(
            name=name,
            floor=names.whole(units),
            end=position,
            kind=kind,
            level=level,
            uses=uses,
            features=features,
            probability=self._odds.probability(features),
            interval=max(float(self._interval[kind, again]), 1e-3),
            since=now,
        )
        self._prospects.add(prospect)
        self._open.append(prospect)
        return prospect

    def _count(self, prospect: Prospect) -> None:
        if not prospect.counted:
            prospect.counted = True
            self._odds.count(prospect.features)

    def _count_old(self, now: float) -> None:
        """Let the odds know of what has had its time to come again; what is younger says nothing by not having come."""
        waiting = self._open
        while waiting and now - waiting[0].since > _PATIENCE * waiting[0].interval:
            self._count(waiting.popleft())

    def _add_feature(self, prospect: Prospect, feature: int) -> None:
        if prospect.counted:
            self._odds.count((feature,))
        prospect.features += (feature,)
        prospect.probability = self._odds.probability(prospect.features)

    def _candidates(self, facts: PromptFacts, known: Prospect | None) -> dict[int, tuple[int, int]]:
        """Positions at which the prompt may part from others, or be continued; the first kind given to one stays."""
        unit, last = facts.unit, facts.last
        found: dict[int, tuple[int, int]] = {}

        def add(position: int, kind: int, level: int = 0) -> None:
            if facts.cached < position < facts.num_tokens:
                found.setdefault(position, (kind, level))

        if known is not None:
            add(known.end, known.kind, known.level)
        add(last, Kind.PROMPT_END)
        for level in (1, 2, 3):
            add(last // (unit << level) * (unit << level), Kind.NEAR_END, level)
        add(min(max(facts.matched, facts.seen), last), Kind.JUNCTION)
        ahead = [at for at in facts.boundaries if facts.cached < at < facts.num_tokens]
        for at in (*ahead[:2], *ahead[-2:]):
            add(at, Kind.BOUNDARY)
        at = last // 2
        while at >= _SPACING_FROM:
            add(at // unit * unit, Kind.SPACING)
            at //= 2
        return found

    def _worth_a_stop(self, found: list[Prospect], cached: int, table: SnapshotTable) -> list[Stop]:
        """Choose greedily: a place is worth its chance times the tokens to the nearest chosen place before it.

        It must save some tokens for the stop, and be worth more than what is being given up.
        """
        chosen = [cached]
        stops: list[Stop] = []
        for prospect in sorted(found, key=lambda p: -p.probability * (p.end - cached)):
            before = max(at for at in chosen if at <= prospect.end)
            gain = prospect.probability * (prospect.end - before)
            pages = table.run + max(prospect.end - max(chosen), 0) // table.page_tokens
            if gain >= _LEAST_GAIN and gain / prospect.interval >= self._price * pages:
                chosen.append(prospect.end)
                stops.append(Stop(prospect.end, Kind(prospect.kind)))
        return stops

    def _refresh(self, table: SnapshotTable, prospect: Prospect) -> None:
        """Tell the table of a prospect's new odds, if it has a snapshot."""
        entry = prospect.entry
        node = table.nodes[entry] if entry != NONE else None
        if node is not None and node.digests[-DIGEST_BYTES:] == prospect.name:
            self._take(table, entry, prospect)

    def _take(self, table: SnapshotTable, entry: int, prospect: Prospect) -> None:
        prospect.entry = entry
        table.chance[entry], table.interval[entry] = prospect.probability, prospect.interval
        table.since[entry] = prospect.since


def _bucket(value: int) -> int:
    return min((value + 1).bit_length() - 1, _BUCKETS - 1)


def _feature(kind: int, which: int, value: int) -> int:
    """The number of "`value` is about this large" for the `which`-th measure of a kind."""
    return _KINDS * 2 + (kind * 6 + which) * _BUCKETS + _bucket(value)


def _chance_now(table: SnapshotTable, entry: int, now: float) -> float:
    chance = float(table.chance[entry])
    left = chance * math.exp((table.since[entry] - now) / table.interval[entry])
    return left / (1.0 - chance + left + 1e-12)
