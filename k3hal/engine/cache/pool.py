"""The allocator that lets memory move freely between pages and state slots."""

from __future__ import annotations

import numpy as np

_FREE, _PAGES, _SLOT = 0, 1, 2


class PagePool:
    """Hands out pages one by one and slots as whole runs of `run` pages, from the same memory.

    A run is free, a slot, or broken into pages. Pages come from broken runs first. Which broken runs have all their
    pages back is only looked for when a slot is wanted: pages come and go by a few array operations, whatever their
    number. Run 0 (slot 0 and its pages) is null and never handed out.
    """

    def __init__(self, num_runs: int, run: int) -> None:
        if num_runs < 1 or run < 1:
            raise ValueError(f"a pool needs at least one run of one page, got {num_runs} of {run}")
        self.num_runs, self.run = num_runs, run
        self.num_pages = num_runs * run
        self._counter = np.arange(self.num_pages, dtype=np.int64)
        self._pages_of = self._counter.reshape(num_runs, run)
        self._run_of = self._counter // run
        # Loose pages: the free pages of broken runs, a stack. `_sorted` while no page came back since they were sorted.
        self._loose = np.zeros(self.num_pages, np.int64)
        self._num_loose = 0
        self._sorted = True
        self._used = np.zeros(self.num_pages, bool)
        self._tag = np.zeros(self.num_pages, np.int64)
        self._kind = np.full(num_runs, _FREE, np.uint8)
        # Free runs: a stack, lowest number on top at the start.
        self._runs = np.zeros(num_runs, np.int64)
        self._runs[: num_runs - 1] = np.arange(num_runs - 1, 0, -1)
        self._num_runs = num_runs - 1

    @property
    def num_free_pages(self) -> int:
        return self._num_loose + self._num_runs * self.run

    @property
    def num_free_runs(self) -> int:
        self._mend()
        return self._num_runs

    @property
    def usage(self) -> float:
        """Fraction of the allocatable memory in use."""
        total = self.num_pages - self.run
        return 1.0 - self.num_free_pages / total if total else 0.0

    def alloc_pages(self, count: int) -> np.ndarray | None:
        """`count` pages, int64, or None with nothing changed when there are not as many."""
        loose = self._num_loose
        if count <= loose:
            pages = self._loose[loose - count : loose].copy()
            self._num_loose = loose - count
        elif count > self.num_free_pages:
            return None
        else:
            short = count - loose
            fresh = self._break_runs(-(-short // self.run))
            pages = np.concatenate((self._loose[:loose], fresh[:short]))
            self._num_loose = fresh.size - short
            self._loose[: self._num_loose] = fresh[short:]
        self._used[pages] = True
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        """Give pages back. Raises `RuntimeError` on a page that is not in use or is named twice."""
        if not self._used[pages].all():
            raise RuntimeError(f"pages freed that are not in use: {pages[~self._used[pages]].tolist()}")
        order = self._counter[: pages.size]
        self._tag[pages] = order
        if (self._tag[pages] != order).any():
            raise RuntimeError(f"a page is named twice in {pages.tolist()}")
        self._used[pages] = False
        end = self._num_loose + pages.size
        self._loose[self._num_loose : end] = pages
        self._num_loose, self._sorted = end, False

    def alloc_slot(self) -> int | None:
        """A slot, or None when no whole run is free."""
        if not self._num_runs:
            self._mend()
        if not self._num_runs:
            return None
        self._num_runs -= 1
        slot = int(self._runs[self._num_runs])
        self._kind[slot] = _SLOT
        return slot

    def free_slot(self, slot: int) -> None:
        """Give a slot back. Raises `RuntimeError` when it is not in use."""
        if self._kind[slot] != _SLOT:
            raise RuntimeError(f"slot {slot} freed that is not in use")
        self._free_runs(np.array([slot], np.int64))

    def open_slot(self, slot: int) -> np.ndarray:
        """Make the memory of a slot pages in use, int64 [run]; the slot is no more."""
        if self._kind[slot] != _SLOT:
            raise RuntimeError(f"slot {slot} opened that is not in use")
        self._kind[slot] = _PAGES
        pages = self._pages_of[slot].copy()
        self._used[pages] = True
        return pages

    def evacuate(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Free one broken run by moving its used pages to other broken runs: (old pages, new pages), same length.

        None with nothing changed when the loose pages elsewhere do not suffice. The caller copies the bytes and renames
        the pages it holds.
        """
        self._mend()
        if self._num_loose < self.run:
            return None
        # Sorted, the stack begins with the run that has most.
        run = int(self._run_of[self._loose[0]])
        pages = self._pages_of[run]
        old = pages[self._used[pages]]
        rest = self._loose[self.run - old.size : self._num_loose]
        new = rest[rest.size - old.size :].copy()
        kept = rest.size - old.size
        self._loose[:kept] = rest[:kept].copy()
        self._num_loose = kept
        self._used[new], self._used[old] = True, False
        self._free_runs(np.array([run], np.int64))
        return old, new

    def _break_runs(self, count: int) -> np.ndarray:
        """The pages of `count` free runs, which are broken from now on."""
        self._num_runs -= count
        runs = self._runs[self._num_runs : self._num_runs + count]
        self._kind[runs] = _PAGES
        return self._pages_of[runs].reshape(-1)

    def _mend(self) -> None:
        """Make runs whole whose pages are all loose, and sort the others' so that the emptiest runs come last.

        Pages are then taken from the runs that have fewest, and those that have most become whole.
        """
        if self._sorted:
            return
        broken = np.flatnonzero(self._kind == _PAGES)
        free = ~self._used.reshape(self.num_runs, self.run)[broken]
        counts = np.count_nonzero(free, axis=1)
        self._free_runs(broken[counts == self.run])
        order = np.argsort(-counts, kind="stable")[np.count_nonzero(counts == self.run) :]
        loose = self._pages_of[broken[order]][free[order]]
        self._num_loose = loose.size
        self._loose[: loose.size] = loose
        self._sorted = True

    def _free_runs(self, runs: np.ndarray) -> None:
        self._kind[runs] = _FREE
        self._runs[self._num_runs : self._num_runs + runs.size] = runs
        self._num_runs += runs.size
