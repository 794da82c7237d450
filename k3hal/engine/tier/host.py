"""Objects in host memory, over a backing or alone."""

from __future__ import annotations

import logging
from itertools import count

import numpy as np

from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.tier.backing import Backing, ObjectDamagedError, ObjectLostError
from k3hal.engine.tier.catalogue import Entry
from k3hal.engine.tier.fetch import Fetch, Part, kv_pages
from k3hal.engine.tier.interface import Fetched, ObjectMeta, ObjectShape, Reservation
from k3hal.engine.tier.jobs import Jobs
from k3hal.engine.tier.shelf import Shelf
from k3hal.engine.tier.write_behind import write_behind

logger = logging.getLogger(__name__)


class HostTier:
    """`Connector` over `memory` u8 [pages, page bytes].

    What is stored goes to host memory and from there, written behind, to the backing. Every page is checked against its
    checksum when it is fetched.
    """

    def __init__(self, memory: np.ndarray, shape: ObjectShape, jobs: Jobs, backing: Backing | None = None) -> None:
        self.shape = shape
        self._shelf = Shelf(memory, shape, backing)
        self.stats = self._shelf.stats
        self._jobs, self._backing = jobs, backing
        self._lock = self._shelf.changed
        self._tickets = count(1)
        self._fetches: dict[int, Fetch] = {}
        self._reserved: dict[int, Entry] = {}
        if backing is not None:
            self._shelf.recall()

    def find(self, names: PrefixNames, limit: int, floor: int) -> bytes | None:
        with self._lock:
            entry = self._longest(names, limit, floor)
        if entry is not None:
            return entry.meta.key
        return b"" if self._shelf.shared and self._shelf.answers else None

    def fetch(self, names: PrefixNames, limit: int, floor: int) -> int | None:
        with self._lock:
            ticket, fetch = next(self._tickets), Fetch(floor)
            entry = self._longest(names, limit, floor)
            if entry is not None and not self._begin(fetch, entry):
                return None
            self._fetches[ticket] = fetch
        if entry is not None:
            self._jobs.read(lambda: self._bring(fetch))
        elif self._shelf.shared:
            self._jobs.read(lambda: self._resolve(fetch, names, limit))
        else:
            fetch.outcome = ""
        return ticket

    def poll(self, ticket: int) -> Fetched | str | None:
        with self._lock:
            fetch = self._fetches[ticket]
            return fetch.result(self.shape) if fetch.found else fetch.outcome

    def release(self, ticket: int) -> None:
        with self._lock:
            fetch = self._fetches.pop(ticket)
            fetch.left = True
            if fetch.outcome is not None:
                self._let_go(fetch)

    def reserve(self, names: PrefixNames, end: int) -> Reservation | None:
        with self._lock:
            catalogue = self._shelf.catalogue
            key = names.at(end)
            known = catalogue.entries.get(key)
            if known is not None:
                catalogue.touch(known)
                return None
            parent = next(catalogue.ending_in(names, end - 1, 0), None)
            start = parent.meta.end if parent else 0
            first = self.shape.first_page(start)
            pages = self._pages_beside(parent, self.shape.pages_for(end) - first + self.shape.run)
            if pages is None:
                self.stats.stores_dropped += 1
                return None
            anchor = names.whole(end // self.shape.unit)
            ticket = next(self._tickets)
            meta = ObjectMeta(key, parent.meta.key if parent else b"", anchor, start, end)
            self._reserved[ticket] = self._shelf.add(meta, pages)
            return Reservation(ticket, first, pages)

    def commit(self, ticket: int, *, ok: bool) -> None:
        with self._lock:
            entry = self._reserved.pop(ticket)
            entry.pending = False
            if not ok or entry.dead:
                self._shelf.unpin([entry])
                self._shelf.drop(entry)
                return
            self.stats.stores += 1
            self._shelf.catalogue.in_host[entry.meta.key] = entry
            self._shelf.catalogue.touch(entry)
        self._jobs.write(lambda: write_behind(self._shelf, entry))

    def discard(self, key: bytes) -> None:
        with self._lock:
            entry = self._shelf.catalogue.entries.get(key)
            if entry is not None:
                self._shelf.drop(entry)

    def wait(self, seconds: float) -> None:
        with self._lock:
            self._lock.wait(seconds)

    def close(self) -> None:
        self._jobs.close()
        if self._backing is not None:
            self._backing.close()

    def _longest(self, names: PrefixNames, limit: int, floor: int) -> Entry | None:
        """The longest prefix that can be fetched now."""
        for entry in self._shelf.catalogue.ending_in(names, limit, floor):
            chain = self._shelf.catalogue.chain(entry)
            ready = not any(step.pending or (step.kv is None and not step.stored) for step in chain)
            if ready and (entry.state is not None or entry.stored):
                return entry
        return None

    def _pages_beside(self, parent: Entry | None, pages: int) -> np.ndarray | None:
        """Host pages for an object, not those of what it builds on; None without room, there or in the queue."""
        if self._jobs.full:
            return None
        chain = self._shelf.catalogue.chain(parent) if parent else []
        self._shelf.pin(chain)
        taken = self._shelf.take(pages)
        self._shelf.unpin(chain)
        return taken

    def _begin(self, fetch: Fetch, entry: Entry) -> bool:
        """Pin what there is of a prefix and take pages for the rest; False, with nothing changed, without room."""
        shelf, shape = self._shelf, self.shape
        shelf.catalogue.touch(entry)
        chain = shelf.catalogue.chain(entry)
        first = shape.first_page(fetch.floor)
        wanted = [(step, False) for step in chain if shape.pages_for(step.meta.end) > first]
        shelf.pin(chain)
        for step, is_state in (*wanted, (entry, True)):
            pages, own = step.pages(is_state), step.pages(is_state) is None
            if own:
                pages = shelf.take(shape.run if is_state else kv_pages(shape, step))
            if pages is None:
                self._put_back(fetch)
                shelf.unpin(chain)
                return False
            fetch.parts.append(Part(step, is_state, pages, own, None if own else step.sums(is_state)))
        shelf.pin(fetch.entries)
        shelf.unpin(chain)
        return True

    def _bring(self, fetch: Fetch) -> None:
        """In a thread: read what is not in host memory, and check all of it."""
        outcome, failed = "", None
        for part in fetch.parts:
            outcome = self._read(part)
            if outcome:
                failed = part.entry
                break
        with self._lock:
            if failed:
                self._shelf.drop(failed, erase=outcome == "corrupt" or not self._shelf.shared)
            else:
                for part in fetch.parts:
                    self._adopt(part)
            self._end(fetch, outcome)

    def _resolve(self, fetch: Fetch, names: PrefixNames, limit: int) -> None:
        """In a thread: ask a shared backing, and bring what it has."""
        assert self._backing is not None
        outcome, metas = "", []
        try:
            metas = self._backing.resolve(names, limit, fetch.floor)
        except OSError as error:
            logger.warning("the external prefix cache cannot be asked: %s", error)
            self._shelf.leave_alone()
            outcome = "error"
        catalogue = self._shelf.catalogue
        with self._lock:
            for meta in metas:
                entry = catalogue.entries.get(meta.key) or catalogue.add(meta)
                entry.stored = entry.stored or not entry.pending
            known = self._longest(names, limit, fetch.floor) if metas else None
            begun = known is not None and self._begin(fetch, known)
            if known is not None and not begun:
                outcome = "no_room"
            if not begun:
                self._shelf.forget_unused(catalogue.entries[meta.key] for meta in reversed(metas))
                self._end(fetch, outcome)
        if begun:
            self._bring(fetch)

    def _end(self, fetch: Fetch, outcome: str) -> None:
        fetch.outcome = outcome
        fetch.found = not outcome and bool(fetch.parts)
        if fetch.left:
            self.stats.stale += 1
            self._let_go(fetch)
        self._lock.notify_all()

    def _read(self, part: Part) -> str:
        """Fill and check one part: one of `FAILURES`, or nothing."""
        try:
            if part.own:
                assert self._backing is not None
                first = part.first(self.shape)
                part.sums = self._backing.read(part.entry.meta, first, self._shelf.rows(part.pages))
        except ObjectLostError:
            return "lost"
        except ObjectDamagedError as error:
            logger.warning("%s", error)
            return "corrupt"
        except OSError as error:
            logger.warning("an object of the external prefix cache cannot be read: %s", error)
            return "error"
        if part.sums is not None and (self._shelf.sums(part.pages) != part.sums).any():
            logger.warning("an object of the external prefix cache does not match its checksum; it is computed anew")
            return "corrupt"
        return ""

    def _adopt(self, part: Part) -> None:
        """Keep what was read for whoever comes next, unless somebody else was faster or it is gone meanwhile."""
        entry = part.entry
        if part.own and not entry.dead and entry.pages(part.is_state) is None:
            entry.hold(part.is_state, part.pages, part.sums)
            part.own = False
            self._shelf.catalogue.in_host[entry.meta.key] = entry
            self._shelf.catalogue.touch(entry)

    def _let_go(self, fetch: Fetch) -> None:
        self._put_back(fetch)
        entries = fetch.entries
        self._shelf.unpin(entries)
        self._shelf.forget_unused(entries[::-1])
        fetch.parts = []

    def _put_back(self, fetch: Fetch) -> None:
        for part in fetch.parts:
            if part.own:
                self._shelf.put_back(part.pages)
