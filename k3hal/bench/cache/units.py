"""Prompts as ids of match units: equal ids are equal tokens behind equal prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from k3hal.bench.cache.trace import TraceRequest


class UnitIndex:
    """Numbers the units of `unit` tokens in the order in which they are first seen."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self._known: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """The ids of the whole units of `tokens`, int64 `[len // unit]`."""
        count = tokens.size // self.unit
        data = np.ascontiguousarray(tokens[: count * self.unit], np.int64).view(np.uint8).reshape(count, self.unit * 8)
        known, parent = self._known, b""
        ids = np.empty(count, np.int64)
        for index in range(count):
            parent = blake2b(data[index].data, key=parent, digest_size=16).digest()
            ids[index] = known.setdefault(parent, len(known))
        return ids


@dataclass(frozen=True, slots=True)
class UnitSequences:
    """Requests as ids of match units: `prompts` can hit, `wholes` (with what was decoded) can be kept.

    `prompts[i]` leaves out the unit of the prompt's last token, which must be computed for its logits. `tokens` is the
    sum of the prompts' lengths.
    """

    unit: int
    prompts: list[np.ndarray]
    wholes: list[np.ndarray]
    tokens: int

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], unit: int) -> UnitSequences:
        index = UnitIndex(unit)
        prompts: list[np.ndarray] = []
        wholes: list[np.ndarray] = []
        total = 0
        for request in requests:
            prompt = request.prompt()
            wholes.append(index.of(np.concatenate((prompt, request.output.tokens()))))
            prompts.append(wholes[-1][: (prompt.size - 1) // unit])
            total += prompt.size
        return cls(unit, prompts, wholes, total)
