"""Where objects lie that host memory need not hold: a disk, or a store that several engines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.tier.interface import ObjectMeta


class ObjectLostError(Exception):
    """The backing no longer has an object."""


class ObjectDamagedError(Exception):
    """What the backing has under an object's name is not that object."""


class Backing(Protocol):
    """Called from the tier's threads, except `scan`. Any call but `scan` may raise `OSError`."""

    @property
    def shared(self) -> bool:
        """Whether others write here too, so that only `resolve` knows what there is."""
        ...

    @property
    def capacity(self) -> int:
        """Bytes this engine may keep here; what is beyond it is removed, least recently used first."""
        ...

    def scan(self) -> list[ObjectMeta]:
        """What is here from earlier runs, least recently used first."""
        ...

    def resolve(self, names: PrefixNames, limit: int, floor: int) -> list[ObjectMeta]:
        """What the longest prefix here of more than `floor` and at most `limit` tokens is made of, in order."""
        ...

    def size(self, meta: ObjectMeta) -> int:
        """Bytes that an object takes here."""
        ...

    def write(self, meta: ObjectMeta, sums: np.ndarray, pages: Sequence[memoryview]) -> None:
        """Keep an object. When this returns it survives a crash, and until then nobody finds it."""
        ...

    def read(self, meta: ObjectMeta, first: int, out: Sequence[memoryview]) -> np.ndarray:
        """Fill `out` with pages from page `first` of the object on; their checksums as they were written, uint32.

        Raises `ObjectLostError` or `ObjectDamagedError`.
        """
        ...

    def remove(self, meta: ObjectMeta) -> None:
        """Forget an object, if it is here."""
        ...

    def close(self) -> None: ...
