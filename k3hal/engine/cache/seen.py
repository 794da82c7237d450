"""A bounded memory of prefixes that were seen, whatever became of their KV."""

from __future__ import annotations

import numpy as np

from k3hal.engine.cache.keys import DIGEST_BYTES


class SeenUnits:
    """Digests of match units in a direct-mapped table: new ones replace old ones that fall on the same place.

    13 bytes a place. It may forget, and two digests agree in 64 bits about never. Of each unit it also knows how long
    the prompt was that it came with first, and whether another has come with it since.
    """

    def __init__(self, places: int = 1 << 19) -> None:
        self._table = np.zeros(places, np.uint64)
        self._mask = np.uint64(places - 1)
        self._length = np.zeros(places, np.int32)
        self._passed = np.zeros(places, np.uint8)

    def known(self, chain: bytes | bytearray, units: int) -> int:
        """How many leading units of a chain of digests were seen. The last one known speaks for those before it."""
        short = _short(chain, units)
        known = np.flatnonzero(self._table[short & self._mask] == short)
        return int(known[-1]) + 1 if known.size else 0

    def note(self, chain: bytes | bytearray, units: int, prompt: int = 0) -> None:
        """Remember the first `units` of a chain; `prompt` tokens, 0 for what is no prompt."""
        short = _short(chain, units)
        at = short & self._mask
        new = at[self._table[at] != short]
        self._table[at] = short
        self._length[new], self._passed[new] = prompt, 0
        if prompt:
            self._passed[at] += self._passed[at] < 2

    def donor(self, chain: bytes | bytearray, units: int) -> int:
        """Tokens of the only prompt that came with the first `units` of a chain; 0 when there were none or several."""
        if not units:
            return 0
        short = _short(chain, units)[-1]
        at = int(short & self._mask)
        return int(self._length[at]) if self._passed[at] == 1 else 0

    def clear(self) -> None:
        self._table[:] = 0
        self._passed[:] = 0


def _short(chain: bytes | bytearray, units: int) -> np.ndarray:
    """The first 64 bits of each digest."""
    return np.frombuffer(bytes(chain[: units * DIGEST_BYTES]), np.uint64)[:: DIGEST_BYTES // 8]
