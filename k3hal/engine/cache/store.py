"""Who holds which page: reference counts over the pool, and the copies owed to the next step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.cache.pool import PagePool


class PageStore:
    """Pages held by rows and by the index, each as often as it likes; a page nobody holds goes back to the pool.

    Copies read what memory held before the step, so the source of one may be given back, and even handed out again,
    as soon as the copy is written down.
    """

    def __init__(self, num_runs: int, run: int) -> None:
        self.pool = PagePool(num_runs, run)
        self.run = run
        self._rows = np.zeros(self.pool.num_pages, np.int32)
        self._index = np.zeros(self.pool.num_pages, np.int32)
        self.row_pages = 0
        """Pages that rows hold, each counted once, and the pages of their slots."""
        self._page_copies: dict[int, int] = {}
        self._slot_copies: dict[int, int] = {}
        self.freed_by_index = 0
        """Pages ever given back because the index let go of them."""

    @property
    def room(self) -> int:
        """Pages that rows do not hold: free, or free once the index lets go."""
        return self.pool.num_pages - self.run - self.row_pages

    def newly_held(self, pages: np.ndarray) -> int:
        """How many of `pages` a row would be the first to hold."""
        return int(np.count_nonzero(self._rows[pages] == 0))

    def hold_in_row(self, pages: np.ndarray) -> None:
        self.row_pages += self.newly_held(pages)
        self._rows[pages] += 1

    def drop_from_row(self, pages: np.ndarray) -> None:
        self._rows[pages] -= 1
        left = pages[self._rows[pages] == 0]
        self.row_pages -= left.size
        self._free(left[self._index[left] == 0])

    def hold_in_index(self, pages: np.ndarray) -> None:
        self._index[pages] += 1

    def drop_from_index(self, pages: np.ndarray) -> None:
        self._index[pages] -= 1
        left = pages[(self._index[pages] == 0) & (self._rows[pages] == 0)]
        self.freed_by_index += left.size
        self._free(left)

    def take_slot(self, *, row: bool) -> int | None:
        slot = self.pool.alloc_slot()
        if slot is not None and row:
            self.row_pages += self.run
        return slot

    def free_slot(self, slot: int, *, row: bool) -> None:
        self.pool.free_slot(slot)
        self._slot_copies.pop(slot, None)
        if row:
            self.row_pages -= self.run

    def open_slot(self, slot: int) -> np.ndarray:
        """A row's slot becomes pages that a row holds, int64 [run]."""
        pages = self.pool.open_slot(slot)
        self.row_pages -= self.run
        self.hold_in_row(pages)
        return pages

    def give_slot_to_index(self) -> None:
        """A row's slot becomes a snapshot where it lies."""
        self.row_pages -= self.run

    def page_source(self, page: int) -> int:
        """Where a page's bytes lie before the step."""
        return self._page_copies.get(page, page)

    def slot_source(self, slot: int) -> int:
        """Where a slot's bytes lie before the step."""
        return self._slot_copies.get(slot, slot)

    def copy_page(self, source: int, target: int) -> None:
        """Owe a copy; `source` is a `page_source`."""
        self._page_copies[target] = source

    def copy_slot(self, source: int, target: int) -> None:
        """Owe a copy; `source` is a `slot_source`."""
        self._slot_copies[target] = source

    def gather_run(self, moved: Callable[[np.ndarray, np.ndarray], None]) -> bool:
        """Free one run by moving pages; `moved` renames them. False when too few pages are free."""
        found = self.pool.evacuate()
        if found is None:
            return False
        old, new = found
        for counts in (self._rows, self._index):
            counts[new] = counts[old]
            counts[old] = 0
        for source, target in zip(old.tolist(), new.tolist(), strict=True):
            self._page_copies[target] = self._page_copies.pop(source, source)
        moved(old, new)
        return True

    def take_copies(self) -> PageCopies:
        """The copies owed since the last call."""
        if not self._page_copies and not self._slot_copies:
            return PageCopies()
        parts = [_pairs(self._page_copies)]
        if self._slot_copies:
            slots = _pairs(self._slot_copies)
            parts.append((slots[:, :, None] * self.run + np.arange(self.run)).reshape(2, -1))
        copies = np.concatenate(parts, axis=1)
        copies = copies[:, copies[0] != copies[1]]
        self._page_copies.clear()
        self._slot_copies.clear()
        return PageCopies(src=copies[0], dst=copies[1])

    def _free(self, pages: np.ndarray) -> None:
        if not pages.size:
            return
        if self._page_copies:
            for page in pages.tolist():
                self._page_copies.pop(page, None)
        self.pool.free_pages(pages)


def _pairs(copies: dict[int, int]) -> np.ndarray:
    """int64 [2, N]: sources, then targets."""
    count = len(copies)
    return np.stack((np.fromiter(copies.values(), np.int64, count), np.fromiter(copies.keys(), np.int64, count)))
