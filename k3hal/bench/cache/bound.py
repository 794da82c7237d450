"""A proven upper bound on what any prefix cache of a given size can hit on a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3hal.bench.cache.units import UnitSequences

_WINDOWS = 48
_ROUNDS = 250


@dataclass(frozen=True, slots=True)
class _Options:
    """Ways to hit: option `k` gives request `owner[k]` `tokens[k]` tokens for `cost[k]` bytes x window `[K, W]`."""

    owner: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray


def bound_hit_tokens(sequences: UnitSequences, *, unit_bytes: int, snapshot_bytes: int, budget: int) -> float:
    """Tokens that no cache of `budget` bytes hits more of, even one that knows the future.

    For request `i` to hit its first `d` units, every one of their KV must have been kept since the last request before
    `i` that had the unit in its tokens (KV is made nowhere else), and a snapshot at depth `d` at least since the last
    request that had unit `d` (a later one did not pass there). Those stretches of different requests never overlap for
    the same unit or snapshot, so the bytes of all hits add up; between two requests their sum is at most the budget.
    Relaxing these limits to one for each of a number of windows of the trace, with a price for each, gives by weak
    duality a bound for *any* prices: the budget's worth plus every request's best gain after paying. A few rounds of
    subgradient descent look for prices that make it small; where they stop does not matter for its truth.
    """
    requests = len(sequences.requests)
    options = _options(sequences, unit_bytes, snapshot_bytes)
    if not options.owner.size or requests < 2:
        return 0.0
    edges = _edges(requests)
    supply = np.diff(edges) * float(budget)
    prices = np.full(_WINDOWS, options.tokens.sum() / max(options.cost.sum(), 1.0))
    best = np.inf
    for round_ in range(_ROUNDS):
        gain = options.tokens - options.cost @ prices
        chosen = _best_of_each(gain, options.owner, requests)
        value = float(supply @ prices) + float(gain[chosen].sum())
        best = min(best, value)
        slope = supply - options.cost[chosen].sum(axis=0)
        norm = float(slope @ slope)
        if norm == 0:
            break
        step = (value - 0.98 * best + 1e-9 * abs(best)) / norm / (1 + round_ / 50)
        prices = np.maximum(prices - step * slope, 0.0)
    return best


def _edges(requests: int) -> np.ndarray:
    """Window borders, float64 `[W + 1]`, over the gaps between requests: gap `t` lies between `t` and `t + 1`."""
    return np.linspace(0, requests - 1, _WINDOWS + 1)


def _best_of_each(gain: np.ndarray, owner: np.ndarray, requests: int) -> np.ndarray:
    """Indices of each request's best option, those that gain nothing left out. `owner` ascends."""
    best = np.zeros(requests)
    np.maximum.at(best, owner, gain)
    hits = np.flatnonzero((gain > 0) & (gain == best[owner]))
    _, first = np.unique(owner[hits], return_index=True)
    return hits[first]


def _options(sequences: UnitSequences, unit_bytes: int, snapshot_bytes: int) -> _Options:
    """Every hit worth considering. Within a run of units last seen by the same request a hit's gain at any prices is
    linear in its depth, and just inside a run it is no more than at the end of the run before, whose snapshot is
    younger: so only the ends of runs matter, and the ends of earlier sequences inside a unit, whose KV is not
    charged."""
    last = np.full(sequences.ids, -1, np.int64)
    edges = _edges(len(sequences.requests))
    owners: list[int] = []
    tokens: list[int] = []
    costs: list[np.ndarray] = []
    for time, request in enumerate(sequences.requests):
        before = last[request.prompt]
        known = int(np.argmax(before < 0)) if (before < 0).any() else before.size
        depths = _run_ends(before[:known])
        held = [_overlap(int(before[depth - 1]), time, edges) for depth in depths]
        kv = _Cumulative(depths, held, unit_bytes)
        hits = [(depth * sequences.unit, depth, span) for depth, span in zip(depths, held, strict=True)]
        hits += [(end.tokens, end.depth, _overlap(int(last[end.id]), time, edges)) for end in request.ends]
        for hit, depth, span in hits:
            owners.append(time)
            tokens.append(hit)
            costs.append(kv.at(depth) + snapshot_bytes * span)
        last[request.whole] = time
        for end in (*request.ends, *([request.end] if request.end else [])):
            last[end.id] = time
    shape = (len(costs), _WINDOWS)
    return _Options(np.array(owners, np.int64), np.array(tokens, float), np.array(costs).reshape(shape))


def _run_ends(before: np.ndarray) -> list[int]:
    """Depths at which a run of units that the same request had last comes to its end."""
    return [*(np.flatnonzero(np.diff(before)) + 1).tolist(), before.size] if before.size else []


class _Cumulative:
    """Bytes x gaps of the KV of a prompt's first units, per window."""

    def __init__(self, depths: list[int], held: list[np.ndarray], unit_bytes: int) -> None:
        self._depths, self._held, self._bytes = depths, held, unit_bytes

    def at(self, depth: int) -> np.ndarray:
        """Of the first `depth` units, float64 `[W]`."""
        total, start = np.zeros(_WINDOWS), 0
        for end, held in zip(self._depths, self._held, strict=True):
            total += max(min(end, depth) - start, 0) * self._bytes * held
            start = end
        return total


def _overlap(begin: int, end: int, edges: np.ndarray) -> np.ndarray:
    """Gaps of each window that lie between requests `begin` and `end`, float64 `[W]`."""
    return np.clip(np.minimum(end, edges[1:]) - np.maximum(begin, edges[:-1]), 0, None)
