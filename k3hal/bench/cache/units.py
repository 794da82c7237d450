"""Prompts as ids of match units: equal ids are equal tokens behind equal prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from k3hal.bench.cache.trace import TraceRequest

_ROOT = -1


@dataclass(frozen=True, slots=True)
class End:
    """Where a sequence ended inside a unit: `tokens` in all, `depth` whole units before; an id is a prefix."""

    id: int
    depth: int
    tokens: int


class UnitIndex:
    """Numbers the units of `unit` tokens, and the ends of sequences inside one, in the order they are first seen."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self._known: dict[bytes, int] = {}
        self._ends: dict[int, dict[bytes, int]] = {}
        self._count = 0

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """The ids of the whole units of `tokens`, int64 `[len // unit]`."""
        count = tokens.size // self.unit
        data = np.ascontiguousarray(tokens[: count * self.unit], np.int64).view(np.uint8).reshape(count, self.unit * 8)
        known, parent = self._known, b""
        ids = np.empty(count, np.int64)
        for index in range(count):
            parent = blake2b(data[index].data, key=parent, digest_size=16).digest()
            number = known.get(parent)
            if number is None:
                number = known[parent] = self._take()
            ids[index] = number
        return ids

    def ends_in(self, tokens: np.ndarray, ids: np.ndarray) -> list[End]:
        """Where earlier sequences ended inside a unit that `tokens`, whose whole units are `ids`, begin with."""
        found: list[End] = []
        for depth, parent in enumerate([_ROOT, *ids.tolist()]):
            for data, number in self._ends.get(parent, {}).items():
                size = len(data) // 8
                start = depth * self.unit
                if start + size <= tokens.size and tokens[start : start + size].tobytes() == data:
                    found.append(End(number, depth, start + size))
        return found

    def note_end(self, tokens: np.ndarray, ids: np.ndarray) -> End | None:
        """A sequence of exactly `tokens` ended; None where that is the end of a unit too."""
        rest = tokens[ids.size * self.unit :].tobytes()
        if not rest:
            return None
        same = self._ends.setdefault(int(ids[-1]) if ids.size else _ROOT, {})
        number = same.get(rest)
        if number is None:
            number = same[rest] = self._take()
        return End(number, ids.size, tokens.size)

    def _take(self) -> int:
        self._count += 1
        return self._count - 1


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request. `prompt` are the units it can hit and `ends` the earlier sequences' ends it can; the last token of a
    prompt is computed in any case. `whole` are the units whose KV it leaves, what was decoded included (the last
    sampled token never ran), and `end` where it ends."""

    prompt: np.ndarray
    ends: tuple[End, ...]
    whole: np.ndarray
    end: End | None


@dataclass(frozen=True, slots=True)
class UnitSequences:
    """A trace as units of `unit` tokens; `tokens` is the sum of the prompts' lengths, `ids` how many ids there are."""

    unit: int
    requests: list[Sequence]
    tokens: int
    ids: int

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], unit: int) -> UnitSequences:
        return cls.of_tokens(((r.prompt(), r.output.tokens()) for r in requests), unit)

    @classmethod
    def of_tokens(cls, requests: Iterable[tuple[np.ndarray, np.ndarray]], unit: int) -> UnitSequences:
        """From prompts and outputs, int64."""
        index, found, total = UnitIndex(unit), [], 0
        for prompt, output in requests:
            tokens = np.concatenate((prompt, output[:-1]))
            whole = index.of(tokens)
            usable = whole[: (prompt.size - 1) // unit]
            ends = tuple(index.ends_in(prompt[:-1], usable))
            found.append(Sequence(usable, ends, whole, index.note_end(tokens, whole)))
            total += prompt.size
        return cls(unit, found, total, index._count)
