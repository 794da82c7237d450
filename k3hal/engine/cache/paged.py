"""The cache of running sequences over a page pool. No prefix outlives its sequence here."""

from __future__ import annotations

import numpy as np

from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.cache.pool import PagePool


class PagedCache:
    """`SequenceCache` without prefix reuse: `lookup` finds nothing, `admit` starts every sequence at token 0.

    When memory would do but lies scattered, admission moves pages together (`PagePool.evacuate`) so that a slot's
    run becomes free; those moves are the only copies.
    """

    def __init__(self, layout: CacheLayout, num_runs: int, max_rows: int, max_tokens: int) -> None:
        self.layout = layout
        self.page_tokens = layout.page_tokens
        self.pool = PagePool(num_runs, layout.pages_per_slot)
        self.page_table = np.zeros((max_rows, max(layout.pages_for(max_tokens), 1)), np.int32)
        self.num_pages = np.zeros(max_rows, np.int32)
        self.slots = np.zeros(max_rows, np.int32)
        self._owner_row = np.zeros(self.pool.num_pages, np.int32)
        self._owner_index = np.zeros(self.pool.num_pages, np.int32)
        self._copies: dict[int, int] = {}

    @property
    def usage(self) -> float:
        return self.pool.usage

    def longest_sequence(self) -> int:
        table = self.page_table.shape[1] * self.page_tokens
        memory = self.layout.longest_sequence(self.pool.num_runs)
        return table if memory is None else min(memory, table)

    def lookup(self, token_ids: np.ndarray) -> int:
        return 0

    def admit(self, row: int, token_ids: np.ndarray, reserve_pages: int = 0) -> int | None:
        if self.slots[row]:
            raise RuntimeError(f"row {row} already holds slot {self.slots[row]}")
        pages = self.layout.pages_for(token_ids.size)
        if pages > self.page_table.shape[1] or self.pool.num_free_pages < pages + self.pool.run + reserve_pages:
            return None
        if not self.pool.num_free_runs and not self._gather_run():
            return None
        slot = self.pool.alloc_slot()
        assert slot is not None
        self.slots[row] = slot
        self._add_pages(row, pages)
        return 0

    def extend(self, row: int, num_tokens: int) -> bool:
        missing = self.layout.pages_for(num_tokens) - int(self.num_pages[row])
        if missing <= 0:
            return True
        if missing > self.pool.num_free_pages or missing + self.num_pages[row] > self.page_table.shape[1]:
            return False
        self._add_pages(row, missing)
        return True

    def release(self, row: int) -> None:
        if not self.slots[row]:
            raise RuntimeError(f"row {row} holds nothing")
        count = self.num_pages[row]
        if count:
            self.pool.free_pages(self.page_table[row, :count].copy())
        self.pool.free_slot(int(self.slots[row]))
        self.num_pages[row] = self.slots[row] = 0

    def take_copies(self) -> PageCopies:
        if not self._copies:
            return PageCopies()
        count = len(self._copies)
        copies = PageCopies(
            src=np.fromiter(self._copies.values(), np.int64, count),
            dst=np.fromiter(self._copies.keys(), np.int64, count),
        )
        self._copies.clear()
        return copies

    def _add_pages(self, row: int, count: int) -> None:
        if not count:
            return
        pages = self.pool.alloc_pages(count)
        assert pages is not None
        start = self.num_pages[row]
        self.page_table[row, start : start + count] = pages
        self._owner_row[pages] = row
        self._owner_index[pages] = np.arange(start, start + count)
        self.num_pages[row] = start + count

    def _gather_run(self) -> bool:
        """Free one run by moving pages. A page moved twice before its copy ran is copied once, from where it lies."""
        moved = self.pool.evacuate()
        if moved is None:
            return False
        old, new = moved
        rows, indices = self._owner_row[old], self._owner_index[old]
        self.page_table[rows, indices] = new
        self._owner_row[new], self._owner_index[new] = rows, indices
        for source, target in zip(old.tolist(), new.tolist(), strict=True):
            self._copies[target] = self._copies.pop(source, source)
        return True
