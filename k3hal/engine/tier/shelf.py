"""The books of the tier: which object lies in which pages, who uses them, and what is given up for what comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import numpy as np

from k3hal.engine.tier.backing import Backing
from k3hal.engine.tier.catalogue import Catalogue, Entry
from k3hal.engine.tier.checks import page_sums
from k3hal.engine.tier.interface import ObjectMeta, ObjectShape, TierStats

logger = logging.getLogger(__name__)

LEFT_ALONE = 30.0
"""Seconds for which a backing that failed is not written to, and a shared one not asked: each time may take long."""


class Shelf:
    """Objects in `memory` u8 [pages, page bytes] and in the backing. Every method needs `changed` held, but `sums`.

    What was used least recently leaves first, host memory and backing alike; an object that is in neither is forgotten
    with all that builds on it. `told` are the `errno`s of failed writes that the log has told of.
    """

    def __init__(self, memory: np.ndarray, shape: ObjectShape, backing: Backing | None) -> None:
        self.shape, self.backing = shape, backing
        self.stats = TierStats()
        self.catalogue = Catalogue(shape.unit)
        self.changed = threading.Condition(threading.RLock())
        self._memory = memory
        self.told: set[int | None] = set()
        self._alone_until = 0.0
        self._free = list(range(memory.shape[0] - 1, -1, -1))

    @property
    def shared(self) -> bool:
        """Whether others write to the backing too."""
        return self.backing is not None and self.backing.shared

    @property
    def answers(self) -> bool:
        """Whether there is a backing that has not failed within the last `LEFT_ALONE` seconds."""
        return self.backing is not None and time.monotonic() >= self._alone_until

    def leave_alone(self) -> None:
        """The backing failed."""
        self._alone_until = time.monotonic() + LEFT_ALONE

    def rows(self, pages: np.ndarray) -> list[memoryview]:
        return [self._memory[page].data for page in pages.tolist()]

    def sums(self, pages: np.ndarray) -> np.ndarray:
        """Checksums of what lies in pages. They must be pinned."""
        return page_sums(self._memory, pages)

    def take(self, pages: int) -> np.ndarray | None:
        """Free pages, int64, those of the objects used least recently where there are not enough.

        None, and nothing given up, where all of them would not be enough either.
        """
        if pages > len(self._free):
            idle = [entry for entry in self.catalogue.in_host.values() if not entry.pins and not entry.dead]
            if pages > len(self._free) + sum(entry.host_pages for entry in idle):
                return None
            for entry in idle:
                if entry.pins or entry.dead:
                    continue
                self._leave_host(entry)
                if pages <= len(self._free):
                    break
        if pages > len(self._free):
            return None
        first = len(self._free) - pages
        taken = np.array(self._free[first:][::-1], np.int64)
        del self._free[first:]
        self._count()
        return taken

    def put_back(self, pages: np.ndarray) -> None:
        self._free += pages.tolist()[::-1]
        self._count()

    def pin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins -= 1
            if entry.dead and not entry.pins:
                self._empty(entry)

    def drop(self, entry: Entry, *, erase: bool = True) -> None:
        """Forget an object and all that builds on it; with `erase` the backing forgets them too."""
        if entry.dead:
            return
        for gone in self.catalogue.remove(entry):
            if gone.stored and erase and self.backing is not None:
                self._unstore(self.backing, gone)
            if not gone.pins:
                self._empty(gone)

    def forget_unused(self, entries: Iterable[Entry]) -> None:
        """What a shared backing has is asked for anew each time: others change it, and there is no end of it."""
        for entry in entries if self.shared else ():
            if not entry.dead and not entry.children and not entry.pins and entry.kv is None:
                self.catalogue.remove(entry)

    def shrink(self, room: int) -> None:
        """Remove objects from the backing, oldest first, until what it holds is no more than `room` bytes."""
        while self.backing is not None and self.catalogue.in_backing and self.stats.backing_bytes > max(room, 0):
            _, entry = self.catalogue.in_backing.popitem(last=False)
            self._unstore(self.backing, entry)
            self.stats.evicted += 1
            if not entry.in_host:
                self.drop(entry)

    def written(self, entry: Entry) -> None:
        """The backing has an object now."""
        assert self.backing is not None
        if entry.dead:
            self._remove(self.backing, entry)
            return
        entry.stored = True
        self.stats.written += 1
        if not self.backing.shared:
            self._enter_backing(entry)
            self.catalogue.touch(entry)

    def recall(self) -> None:
        """Enter what an earlier run left in the backing; what has lost what it builds on is removed."""
        assert self.backing is not None
        metas = self.backing.scan()
        self.stats.damaged += self.backing.dropped
        for meta in sorted(metas, key=lambda meta: meta.end):
            parent = self.catalogue.entries.get(meta.parent)
            begins = parent is not None and parent.meta.end == meta.start if meta.start else not meta.parent
            entry = self.catalogue.add(meta) if begins and meta.start < meta.end else None
            if entry is None:
                self.backing.remove(meta)
                self.stats.damaged += 1
        recalled = [self.catalogue.entries[meta.key] for meta in metas if meta.key in self.catalogue.entries]
        for entry in recalled:
            entry.stored = True
            self._enter_backing(entry)
        for entry in recalled:
            self.catalogue.touch(entry)
        self.shrink(self.backing.capacity)

    def add(self, meta: ObjectMeta, pages: np.ndarray) -> Entry:
        """A new object whose KV and then state are on their way into `pages`."""
        entry = self.catalogue.add(meta)
        kv = pages.size - self.shape.run
        entry.hold(False, pages[:kv], None)
        entry.hold(True, pages[kv:], None)
        entry.pending, entry.pins = True, 1
        return entry

    def _leave_host(self, entry: Entry) -> None:
        del self.catalogue.in_host[entry.meta.key]
        if entry.stored:
            self._empty(entry)
            self.forget_unused([entry])
        else:
            self.stats.evicted += 1
            self.drop(entry)

    def _enter_backing(self, entry: Entry) -> None:
        assert self.backing is not None
        self.stats.backing_bytes += self.backing.size(entry.meta)
        self.catalogue.in_backing[entry.meta.key] = entry

    def _unstore(self, backing: Backing, entry: Entry) -> None:
        entry.stored = False
        if not backing.shared:
            self.stats.backing_bytes -= backing.size(entry.meta)
        self._remove(backing, entry)

    def _remove(self, backing: Backing, entry: Entry) -> None:
        try:
            backing.remove(entry.meta)
        except OSError as error:
            logger.warning("an object of the external prefix cache cannot be removed: %s", error)

    def _empty(self, entry: Entry) -> None:
        """Free an object's pages."""
        for is_state in (False, True):
            pages = entry.pages(is_state)
            if pages is not None:
                self._free += pages.tolist()
            entry.hold(is_state, None, None)
        self._count()

    def _count(self) -> None:
        self.stats.host_bytes = (self._memory.shape[0] - len(self._free)) * self.shape.page_bytes
