"""One prefix on its way into host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from k3hal.engine.tier.catalogue import Entry
from k3hal.engine.tier.interface import Fetched, ObjectShape


@dataclass(slots=True, eq=False)
class Part:
    """KV or state of one object. `own` pages were taken for this fetch; others were in host memory already.

    `sums` are the checksums they must have, where anybody knows them.
    """

    entry: Entry
    is_state: bool
    pages: np.ndarray
    own: bool
    sums: np.ndarray | None = None

    def first(self, shape: ObjectShape) -> int:
        """Its first page within the object."""
        return kv_pages(shape, self.entry) if self.is_state else 0


@dataclass(slots=True, eq=False)
class Fetch:
    """`parts` from the first token on, the state last. `outcome` None while under way, "" when it is all there."""

    floor: int
    parts: list[Part] = field(default_factory=list)
    outcome: str | None = None
    found: bool = False
    left: bool = False

    @property
    def entries(self) -> list[Entry]:
        return list(dict.fromkeys(part.entry for part in self.parts))

    def result(self, shape: ObjectShape) -> Fetched:
        """Where it lies. Of two objects that share a page the later one has it whole."""
        target = self.parts[-1].entry
        end, first = target.meta.end, shape.first_page(self.floor)
        kv = np.zeros(shape.pages_for(end), np.int64)
        for part in self.parts[:-1]:
            begin = shape.first_page(part.entry.meta.start)
            kv[begin : begin + part.pages.size] = part.pages
        return Fetched(end, kv[first:], self.parts[-1].pages)


def kv_pages(shape: ObjectShape, entry: Entry) -> int:
    """Pages of KV that an object has."""
    return shape.pages_for(entry.meta.end) - shape.first_page(entry.meta.start)
