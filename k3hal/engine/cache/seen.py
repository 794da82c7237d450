"""A bounded memory of prefixes that were seen, whatever became of their KV."""

from __future__ import annotations

import numpy as np

from k3hal.engine.cache.keys import DIGEST_BYTES


class SeenUnits:
    """Digests of match units in a direct-mapped table: new ones replace old ones that fall on the same place.

    8 bytes a place. It may forget, and two digests agree in 64 bits about never.
    """

    def __init__(self, places: int = 1 << 19) -> None:
        self._table = np.zeros(places, np.uint64)
        self._mask = np.uint64(places - 1)

    def known(self, chain: bytes | bytearray, units: int) -> int:
        """How many leading units of a chain of digests were seen. The last one known speaks for those before it."""
        short = _short(chain, units)
        known = np.flatnonzero(self._table[short & self._mask] == short)
        return int(known[-1]) + 1 if known.size else 0

    def note(self, chain: bytes | bytearray, units: int) -> None:
        short = _short(chain, units)
        self._table[short & self._mask] = short

    def clear(self) -> None:
        self._table[:] = 0


def _short(chain: bytes | bytearray, units: int) -> np.ndarray:
    """The first 64 bits of each digest."""
    return np.frombuffer(bytes(chain[: units * DIGEST_BYTES]), np.uint64)[:: DIGEST_BYTES // 8]
