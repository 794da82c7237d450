"""Which objects the tier has: by name, by what they build on, and by when they were last used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.tier.interface import ObjectMeta


class Entry:
    """One object.

    `kv` and `state` are its pages in host memory, None where they are not; their checksums are None until somebody has
    computed them. `stored` says that the backing has it. A `pending` entry's bytes are still on their way from the
    device. While somebody uses its pages (`pins`) they stay; a `dead` one is found no more.
    """

    __slots__ = ("_pages", "_sums", "children", "dead", "meta", "parent", "pending", "pins", "stored")

    def __init__(self, meta: ObjectMeta, parent: Entry | None) -> None:
        self.meta, self.parent = meta, parent
        self.children: set[Entry] = set()
        self.pins = 0
        self.pending = self.stored = self.dead = False
        self._pages: list[np.ndarray | None] = [None, None]
        self._sums: list[np.ndarray | None] = [None, None]

    @property
    def kv(self) -> np.ndarray | None:
        return self._pages[False]

    @property
    def state(self) -> np.ndarray | None:
        return self._pages[True]

    @property
    def in_host(self) -> bool:
        return self.kv is not None and self.state is not None

    @property
    def host_pages(self) -> int:
        """How many pages of host memory it takes."""
        return sum(pages.size for pages in self._pages if pages is not None)

    def pages(self, is_state: bool) -> np.ndarray | None:
        """int64 pages of the state, or of the KV."""
        return self._pages[is_state]

    def sums(self, is_state: bool) -> np.ndarray | None:
        """uint32, one for each of `pages`."""
        return self._sums[is_state]

    def all_sums(self) -> np.ndarray:
        """Of the KV and then the state; both are known."""
        kv, state = self._sums
        assert kv is not None and state is not None
        return np.concatenate((kv, state))

    def hold(self, is_state: bool, pages: np.ndarray | None, sums: np.ndarray | None) -> None:
        """Its KV or state lies in `pages` from now on."""
        self._pages[is_state], self._sums[is_state] = pages, sums


class Catalogue:
    """Entries by key. An entry whose parent goes, goes with it: its prefix has no beginning any more.

    In the orders of use, host's and backing's, what an entry builds on counts as used after it. So what is given up
    from the old end is never built on by anything younger.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self.entries: dict[bytes, Entry] = {}
        self.in_host: OrderedDict[bytes, Entry] = OrderedDict()
        self.in_backing: OrderedDict[bytes, Entry] = OrderedDict()
        self._ends: dict[bytes, list[Entry]] = {}

    def add(self, meta: ObjectMeta) -> Entry:
        """A new entry. Its parent must be there, if it has one."""
        entry = Entry(meta, self.entries[meta.parent] if meta.parent else None)
        if entry.parent:
            entry.parent.children.add(entry)
        self.entries[meta.key] = entry
        self._ends.setdefault(meta.anchor, []).append(entry)
        return entry

    def remove(self, entry: Entry) -> list[Entry]:
        """Take out an entry and all that builds on it; those taken out, the entry last."""
        gone = [other for child in list(entry.children) for other in self.remove(child)]
        if entry.parent:
            entry.parent.children.discard(entry)
        del self.entries[entry.meta.key]
        self.in_host.pop(entry.meta.key, None)
        self.in_backing.pop(entry.meta.key, None)
        same = self._ends[entry.meta.anchor]
        same.remove(entry)
        if not same:
            del self._ends[entry.meta.anchor]
        entry.dead = True
        return [*gone, entry]

    def touch(self, entry: Entry) -> None:
        """It was used, and what it builds on."""
        step: Entry | None = entry
        while step is not None:
            for order in (self.in_host, self.in_backing):
                if step.meta.key in order:
                    order.move_to_end(step.meta.key)
            step = step.parent

    def chain(self, entry: Entry) -> list[Entry]:
        """An entry and what it builds on, from the first token on."""
        path = [entry]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def ending_in(self, names: PrefixNames, limit: int, floor: int) -> Iterator[Entry]:
        """The entries of prefixes of more than `floor` and at most `limit` tokens, longest first."""
        for units in range(limit // self._unit, floor // self._unit - 1, -1):
            same = self._ends.get(names.whole(units))
            for entry in sorted(same or (), key=lambda entry: -entry.meta.end):
                end = entry.meta.end
                if floor < end <= limit and entry.meta.key == names.at(end):
                    yield entry
