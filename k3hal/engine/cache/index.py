"""What the cache holds beside the running sequences, and what it gives up when memory runs out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.keys import DIGEST_BYTES, UnitKeys
from k3hal.engine.cache.policy import Kind, RetentionPolicy
from k3hal.engine.cache.seen import SeenUnits
from k3hal.engine.cache.snapshots import SnapshotTable
from k3hal.engine.cache.stats import CacheStats
from k3hal.engine.cache.store import PageStore
from k3hal.engine.cache.tree import NO_SLOT, Match, Node, PrefixTree, below

_UNPAID = -1
"""Stands for the slot of a snapshot while memory is made for it."""


class PrefixIndex:
    """Tree and snapshots over a page store. KV is held exactly as far as a snapshot needs it."""

    def __init__(
        self,
        geometry: CacheGeometry,
        store: PageStore,
        policy: RetentionPolicy,
        unit: int,
        stats: CacheStats,
        clock: Callable[[], float],
        page_moved: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        self.tree = PrefixTree(
            unit, geometry.page_tokens, store.pool.num_pages, store.hold_in_index, store.drop_from_index
        )
        self.table = SnapshotTable(store.run)
        self.seen = SeenUnits()
        self._store, self.policy, self._stats, self._clock = store, policy, stats, clock
        self._page_moved = page_moved

    @property
    def num_units(self) -> int:
        """Match units whose KV is held."""
        return sum((node.end - node.start) // self.tree.unit for node in self.tree.nodes())

    def match(self, keys: UnitKeys, token_ids: np.ndarray, limit: int) -> Match:
        return self.tree.match(keys, token_ids, limit)

    def touch(self, node: Node) -> None:
        """A prompt begins with the snapshot of `node`."""
        now, entry = self._clock(), node.entry
        self.policy.reused(self.table, entry, now)
        self.table.used[entry] = now

    def make_room(self, pages: int, *, slot: bool) -> bool:
        """See that `pages` pages, and beside them a slot if asked for, are free. False when there is no way to."""
        return self._free_pages(pages + self._store.run * slot, None) and (not slot or self._whole_run())

    def snapshot(self, keys: UnitKeys, token_ids: np.ndarray, pages: np.ndarray, slot: int, kind: Kind) -> Node | None:
        """Copy the state in `slot`, that after `token_ids` whose KV is in `pages`, and make both known.

        None when the copy would be the first thing to give up, or is there already.
        """
        node = self.tree.insert(keys, token_ids, pages)
        if node.slot:
            self.table.used[node.entry] = self._clock()
            return None
        node.slot = _UNPAID
        self._enter(node, kind)
        if not self._free_pages(self._store.run, node) or not self._whole_run():
            if node.slot:
                self._give_up(node.entry)
            return None
        taken = self._store.take_slot(row=False)
        assert taken is not None
        node.slot = taken
        self._store.copy_slot(self._store.slot_source(slot), taken)
        self._stats.snapshots_taken += 1
        return node

    def adopt(self, keys: UnitKeys, token_ids: np.ndarray, pages: np.ndarray, slot: int, kind: Kind) -> bool:
        """Make a row's own state known where it lies; False when there is one already, and `slot` stays the row's."""
        node = self.tree.insert(keys, token_ids, pages)
        if node.slot:
            self.table.used[node.entry] = self._clock()
            return False
        node.slot = slot
        self._store.give_slot_to_index()
        self._enter(node, kind)
        return True

    def _enter(self, node: Node, kind: Kind) -> None:
        entry = self.table.add(node, kind, self._clock())
        self.policy.added(self.table, entry, node.digests[-DIGEST_BYTES:])

    def withdraw(self, node: Node) -> None:
        """Forget the snapshots before, at and after `node`: what comes of a wrong state is wrong, its source may be."""
        wrong: list[Node] = []
        above = node.parent
        while above is not None:
            wrong.append(above)
            above = above.parent
        after = [node]
        while after:
            step = after.pop()
            wrong.append(step)
            after += below(step)
        for step in wrong:
            if step.slot:
                self._give_up(step.entry)

    def clear(self) -> None:
        """Forget everything."""
        for entry in self.table.entries().tolist():
            self._give_up(entry)
        self.seen.clear()

    def _whole_run(self) -> bool:
        return self._store.pool.num_free_runs > 0 or self._store.gather_run(self._moved)

    def _free_pages(self, count: int, wanted: Node | None) -> bool:
        """Give up snapshots from the lowest score on until `count` pages are free.

        False when that is not enough, or when it would be the turn of `wanted`, which is given up itself.
        """
        pool = self._store.pool
        if pool.num_free_pages >= count:
            return True
        table, now = self.table, self._clock()
        entries = table.entries()
        table.score[entries] = self.policy.scores(table, entries, now)
        before = self._store.freed_by_index
        while pool.num_free_pages < count and entries.size:
            victim = int(entries[table.score[entries].argmin()])
            if wanted is not None and victim == wanted.entry:
                break
            self.policy.dropped(table, victim, now)
            changed = self._give_up(victim)
            table.score[changed] = self.policy.scores(table, changed, now)
            self._stats.snapshots_evicted += 1
            entries = table.entries()
        self._stats.pages_evicted += self._store.freed_by_index - before
        return pool.num_free_pages >= count

    def _give_up(self, entry: int) -> np.ndarray:
        """Forget a snapshot and the KV that only it needed; the entries whose worth that changed."""
        parent = int(self.table.parent[entry])
        heirs = np.flatnonzero((self.table.parent == entry) & self.table.live)
        node = self.table.remove(entry)
        if node.slot != _UNPAID:
            self._store.free_slot(node.slot, row=False)
        node.slot = NO_SLOT
        left = self.tree.prune(node)
        self.table.weigh(left)
        changed = heirs if parent < 0 else np.append(heirs, parent)
        if parent >= 0:
            above = self.table.nodes[parent]
            assert above is not None
            self.table.weigh(above)
        return changed if not left.slot else np.append(changed, left.entry)

    def _moved(self, old: np.ndarray, new: np.ndarray) -> None:
        self._page_moved(old, new)
        for source, target in zip(old.tolist(), new.tolist(), strict=True):
            self.tree.rename(source, target)
