"""Names of prefixes: chained digests of whole match units, and of what lies beyond the last whole one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixContext:
    """What besides the tokens decides whether two prefixes are the same, and where they may part.

    `salt` and `adapter` separate everything. `media` are (token position, content digest) pairs, in order: tokens that
    stand for an image differ with it. `boundaries` are token positions at which a message, a tool list or a role ends,
    in order; they are hints and separate nothing. A `private` sequence finds nothing and leaves nothing.
    """

    salt: str = ""
    adapter: str = ""
    media: tuple[tuple[int, bytes], ...] = ()
    boundaries: tuple[int, ...] = ()
    private: bool = False


NO_CONTEXT = PrefixContext()


class UnitKeys:
    """The digests of one sequence, computed once however often it is asked for and however far it grows.

    A digest covers the whole prefix up to its end: tokens, context, and the digest before it. Each chain starts from
    `seed`; while that is secret, nobody outside can look for collisions.
    """

    __slots__ = ("_chain", "_context", "_root", "_unit")

    def __init__(self, context: PrefixContext, unit: int, seed: bytes) -> None:
        self._unit = unit
        self._context = context
        names = [part.encode() for part in (context.salt, context.adapter)]
        self._root = self._digest(seed + b"".join(len(name).to_bytes(8, "little") + name for name in names))
        self._chain = bytearray()

    @property
    def context(self) -> PrefixContext:
        return self._context

    @property
    def num_units(self) -> int:
        return len(self._chain) // DIGEST_BYTES

    def known(self) -> bytes:
        """The digests computed so far."""
        return bytes(self._chain)

    def chain(self, token_ids: np.ndarray) -> bytearray:
        """The digests of the whole units of `token_ids` int64 [T], one after the other, and of any known beyond them.

        The tokens already covered must be those of earlier calls.
        """
        done, unit = self.num_units, self._unit
        units = token_ids.size // unit
        if units <= done:
            return self._chain
        size = unit * 4
        data = token_ids[done * unit : units * unit].astype("<i4").tobytes()
        last = bytes(self._chain[-DIGEST_BYTES:]) or self._root
        sha256, chain = hashlib.sha256, self._chain
        media = self._context.media
        for i in range(units - done):
            part = data[i * size : (i + 1) * size]
            if media:
                part += self._media_between((done + i) * unit, (done + i + 1) * unit)
            last = sha256(last + part).digest()[:DIGEST_BYTES]
            chain += last
        return chain

    @property
    def unit(self) -> int:
        return self._unit

    @property
    def root(self) -> bytes:
        """What stands for the empty prefix."""
        return self._root

    def tail(self, token_ids: np.ndarray) -> bytes:
        """The digest of a prefix that ends inside a unit. No whole unit has it."""
        self.chain(token_ids)
        start = token_ids.size // self._unit * self._unit
        before = bytes(self._chain[: start // self._unit * DIGEST_BYTES][-DIGEST_BYTES:]) or self._root
        data = token_ids[start:].astype("<i4").tobytes() + self._media_between(start, token_ids.size)
        return self._digest(b"tail" + before + data)

    def _digest(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()[:DIGEST_BYTES]

    def _media_between(self, start: int, end: int) -> bytes:
        """What to add to the tokens `[start, end)`: each medium's place and digest, never to be taken for tokens."""
        return b"".join(
            b"\xff" * 4 + at.to_bytes(8, "little") + len(digest).to_bytes(8, "little") + digest
            for at, digest in self._context.media
            if start <= at < end
        )


class PrefixNames:
    """The names of all prefixes of `token_ids`, as far as anybody asks for them."""

    __slots__ = ("_chain", "_keys", "_tokens", "unit")

    def __init__(self, keys: UnitKeys, token_ids: np.ndarray) -> None:
        self._keys, self._tokens = keys, token_ids
        self._chain = bytes(keys.chain(token_ids))
        self.unit = keys.unit

    def whole(self, units: int) -> bytes:
        """The name of the first `units` whole units; the empty prefix has one too."""
        return self._chain[(units - 1) * DIGEST_BYTES : units * DIGEST_BYTES] if units else self._keys.root

    def at(self, position: int) -> bytes:
        """The name of the first `position` tokens."""
        units, rest = divmod(position, self.unit)
        return self._keys.tail(self._tokens[:position]) if rest else self.whole(units)
