"""The external tier: prefixes that are kept outside the device's memory, and what the cache asks of whoever keeps them.

An object is a span of a sequence: the KV of its tokens and the state after the last of them, so that a prefix is whole
objects one after the other. What moves between device and tier are pages, and every movement is an entry of a step
plan with an epoch of its own; whoever reports an epoch that nobody waits for is not listened to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from k3hal.engine.cache.keys import PrefixNames

FAILURES = ("lost", "corrupt", "timeout", "error", "no_room", "transfer")
"""Why a prefix that the tier has was computed after all: its object was gone, or not what its checksum says; it came
too late; reading it failed; host memory or device memory had no room for it; the movement to the device failed."""


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """How objects are made of pages: `page_tokens` tokens of KV each, if there is any, then `run` pages of state.

    `unit` is the match unit. Pages are `page_bytes` long.
    """

    page_tokens: int
    page_bytes: int
    run: int
    unit: int
    has_kv: bool = True

    def first_page(self, start: int) -> int:
        """The page in which an object that starts after `start` tokens begins."""
        return start // self.page_tokens if self.has_kv else 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens) if self.has_kv else 0


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What names an object. It holds the tokens `[start, end)` of every sequence that begins as `key` says.

    `key` names the first `end` tokens, `parent` is the key of the object that ends at `start` (empty at 0), `anchor`
    names the whole match units among the first `end` tokens. Names cover salt, adapter and media (`cache/keys.py`).
    """

    key: bytes
    parent: bytes
    anchor: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Pages to move between device and host: `device` and `host` int64, same length, each without repeats."""

    epoch: int
    device: np.ndarray
    host: np.ndarray


@dataclass(frozen=True, slots=True)
class Transfers:
    """A step's movements. `stores` read what lay in their pages before the step; `loads` write after its copies.

    Nothing else reads or writes the device pages of a load, nor the host pages of either, until its end is reported.
    """

    stores: tuple[PageTransfer, ...] = ()
    loads: tuple[PageTransfer, ...] = ()

    def __len__(self) -> int:
        return len(self.stores) + len(self.loads)

    @property
    def epochs(self) -> list[int]:
        return [transfer.epoch for transfer in (*self.stores, *self.loads)]


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A movement ended. Without `ok` its target holds nothing."""

    epoch: int
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Reservation:
    """Host pages for the object that a store will bring: KV from page `first_page` of the sequence on, then state."""

    ticket: int
    first_page: int
    host: np.ndarray


@dataclass(frozen=True, slots=True)
class Fetched:
    """A prefix of `end` tokens in host memory, checked: `kv` from the page asked for on, and `state`, int64 pages."""

    end: int
    kv: np.ndarray
    state: np.ndarray


@dataclass(slots=True)
class TierStats:
    """Counters that only grow, and the bytes in use. Tokens in `queries` and `hits`, objects in the rest."""

    queries: int = 0
    hits: int = 0
    loads: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))
    stores: int = 0
    stores_dropped: int = 0
    stale: int = 0
    written: int = 0
    write_errors: int = 0
    damaged: int = 0
    evicted: int = 0
    host_bytes: int = 0
    backing_bytes: int = 0


class Connector(Protocol):
    """Who keeps objects. Called by the scheduler only, and never waits for anything but a lock held for moments."""

    stats: TierStats
    shape: ObjectShape

    def find(self, names: PrefixNames, limit: int, floor: int) -> bytes | None:
        """The key of the longest prefix that is kept, of more than `floor` and at most `limit` tokens.

        None when there is none; empty when only `fetch` can tell.
        """
        ...

    def fetch(self, names: PrefixNames, limit: int, floor: int) -> int | None:
        """Begin to bring the longest prefix of more than `floor` and at most `limit` tokens into host memory.

        It comes without the pages that lie whole in the first `floor` tokens. A ticket, or None without room.
        """
        ...

    def poll(self, ticket: int) -> Fetched | str | None:
        """What a fetch brought, or one of `FAILURES` (empty when there is no such prefix); None while it is on its way.

        What it brought stays in its pages until `release`.
        """
        ...

    def release(self, ticket: int) -> None:
        """A fetch is done with, or not waited for any longer; what it still brings is dropped."""
        ...

    def reserve(self, names: PrefixNames, end: int) -> Reservation | None:
        """Room for the object that makes the first `end` tokens known; None when they are, or there is no room."""
        ...

    def commit(self, ticket: int, *, ok: bool) -> None:
        """The reserved pages hold what they should, or never will."""
        ...

    def discard(self, key: bytes) -> None:
        """Nothing of the object, of those it builds on and of those that build on it may be used any more."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something came to an end, or after `seconds`."""
        ...

    def close(self) -> None:
        """Write what is still to be written, and let go of everything."""
        ...
