"""What a cache could hit that knows the future: a strong reference, the ceiling of any memory, and a proven bound.

All three see prompts only, one at a time in order of arrival, with pages and snapshots of the engine's own sizes and
hits at match units; none of them charges the running request's own memory. `docs/bench.md` says how they differ.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from k3hal.bench.cache.bound import bound_hit_tokens
from k3hal.bench.cache.units import End, Sequence, UnitSequences

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Foresight:
    """Fractions of the prompt tokens.

    `reference` follows Belady's rule: it keeps a snapshot only where a later prompt's longest repeated prefix ends
    exactly, and evicts what is needed farthest in the future, KV beyond every kept use first. It is reachable and
    strong; no proof says that nothing beats it, since pages and snapshots differ in size. `ceiling` is an unlimited
    memory's hit rate, with a snapshot at every unit. `bound` is proven: no cache of this budget hits more
    (`bound_hit_tokens`).
    """

    reference: float
    bound: float
    ceiling: float


def foresee(sequences: UnitSequences, *, unit_bytes: int, snapshot_bytes: int, budget: int) -> Foresight:
    """`unit_bytes` are the KV's of one match unit; all sizes in bytes."""
    total = max(sequences.tokens, 1)
    junctions = _junctions(sequences)
    reference = _Belady(sequences, junctions, unit_bytes, snapshot_bytes).run(budget)
    bound = bound_hit_tokens(sequences, unit_bytes=unit_bytes, snapshot_bytes=snapshot_bytes, budget=budget)
    ceiling = sum(junction.tokens for junction in junctions if junction)
    return Foresight(reference / total, min(bound, ceiling) / total, ceiling / total)


def _junctions(sequences: UnitSequences) -> list[End | None]:
    """The longest prefix of each prompt that some earlier request had and a snapshot can stand for."""
    seen: set[int] = set()
    found: list[End | None] = []
    for request in sequences.requests:
        best: End | None = None
        for depth, unit in enumerate(request.prompt.tolist(), 1):
            if unit not in seen:
                break
            best = End(unit, depth, depth * sequences.unit)
        for end in request.ends:
            if best is None or end.tokens > best.tokens:
                best = end
        found.append(best)
        seen.update(request.whole.tolist())
    return found


class _Uses:
    """When each unit is next needed; time is the index of a request."""

    def __init__(self) -> None:
        self._times: dict[int, list[int]] = {}

    def add(self, unit: int, time: int) -> None:
        self._times.setdefault(unit, []).append(time)

    def ready(self) -> None:
        for times in self._times.values():
            times.reverse()

    def after(self, unit: int, time: int) -> int:
        """The next use after `time`, which never goes back for the same unit."""
        times = self._times.get(unit)
        while times and times[-1] <= time:
            times.pop()
        return times[-1] if times else _NEVER


class _Belady:
    """Farthest next use goes first, of KV units and snapshots alike; of equals the deepest."""

    def __init__(
        self, sequences: UnitSequences, junctions: Iterable[End | None], unit_bytes: int, snapshot_bytes: int
    ) -> None:
        self._sequences = sequences
        self._bytes = (unit_bytes, snapshot_bytes)
        self._needs = (_Uses(), _Uses())
        for time, (request, junction) in enumerate(zip(sequences.requests, junctions, strict=True)):
            for unit in request.whole.tolist():
                self._needs[0].add(unit, time)
            if junction:
                self._needs[1].add(junction.id, time)
        for uses in self._needs:
            uses.ready()
        self._kept: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = ({}, {})
        self._heap: list[tuple[tuple[int, int], int, int]] = []
        self._size = 0

    def run(self, budget: int) -> int:
        """Hit tokens under `budget` bytes."""
        hits = 0
        for time, request in enumerate(self._sequences.requests):
            hits += self._hit(request)
            for depth, unit in enumerate(request.whole.tolist(), 1):
                self._keep(0, unit, time, depth)
                self._keep(1, unit, time, depth)
            for end in (*request.ends, request.end):
                if end is not None:
                    self._keep(1, end.id, time, end.depth)
            while self._size > budget:
                self._evict()
        return hits

    def _hit(self, request: Sequence) -> int:
        pages, snapshots = self._kept
        hit = reach = 0
        for depth, unit in enumerate(request.prompt.tolist(), 1):
            if unit not in pages:
                break
            reach = depth
            if unit in snapshots:
                hit = depth * self._sequences.unit
        tails = (end.tokens for end in request.ends if end.depth <= reach and end.id in snapshots)
        return max(hit, *tails, 0)

    def _keep(self, kind: int, unit: int, time: int, depth: int) -> None:
        """Note the next use of what this request passes; what has none is not taken in."""
        need, kept = self._needs[kind].after(unit, time), self._kept[kind]
        if need == _NEVER and unit not in kept:
            return
        priority = (-need, -depth)
        if unit not in kept:
            self._size += self._bytes[kind]
        elif kept[unit] == priority:
            return
        kept[unit] = priority
        heapq.heappush(self._heap, (priority, kind, unit))

    def _evict(self) -> None:
        priority, kind, unit = heapq.heappop(self._heap)
        if self._kept[kind].get(unit) == priority:
            del self._kept[kind][unit]
            self._size -= self._bytes[kind]
