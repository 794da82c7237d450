"""The allocator that lets memory move freely between pages and state slots."""

from __future__ import annotations

import numpy as np

_FREE, _PAGES, _SLOT = 0, 1, 2


class PagePool:
    """Hands out pages one by one and slots as whole runs of `run` pages, from the same memory.

    A run is free, a slot, or broken into pages. Pages come from broken runs first and a run whose pages are all back is
    whole again, so slots stay possible. Run 0 (slot 0 and its pages) is null and never handed out. Work is a handful of
    array operations per call, whatever the number of pages.
    """

    def __init__(self, num_runs: int, run: int) -> None:
        if num_runs < 1 or run < 1:
            raise ValueError(f"a pool needs at least one run of one page, got {num_runs} of {run}")
        self.num_runs, self.run = num_runs, run
        self.num_pages = num_runs * run
        self._counter = np.arange(self.num_pages, dtype=np.int64)
        self._run_of = self._counter // run
        self._in_run = self._counter[:run]
        # Loose pages: the free pages of broken runs, a stack with each page's place in it (-1 elsewhere).
        self._loose = np.zeros(self.num_pages, np.int64)
        self._place = np.full(self.num_pages, -1, np.int64)
        self._num_loose = 0
        self._loose_in_run = np.zeros(num_runs, np.int64)
        self._kind = np.full(num_runs, _FREE, np.uint8)
        self._used = np.zeros(self.num_pages, bool)
        # Free runs: a stack, lowest number on top at the start.
        self._runs = np.zeros(num_runs, np.int64)
        self._runs[: num_runs - 1] = np.arange(num_runs - 1, 0, -1)
        self._num_runs = num_runs - 1

    @property
    def num_free_pages(self) -> int:
        return self._num_loose + self._num_runs * self.run

    @property
    def num_free_runs(self) -> int:
        return self._num_runs

    @property
    def usage(self) -> float:
        """Fraction of the allocatable memory in use."""
        total = self.num_pages - self.run
        return 1.0 - self.num_free_pages / total if total else 0.0

    def alloc_pages(self, count: int) -> np.ndarray | None:
        """`count` pages, int64, or None with nothing changed when there are not as many."""
        if count > self.num_free_pages:
            return None
        short = count - self._num_loose
        if short <= 0:
            pages = self._loose[self._num_loose - count : self._num_loose].copy()
            self._num_loose -= count
        else:
            fresh = self._break_runs(-(-short // self.run))
            pages = np.concatenate((self._loose[: self._num_loose], fresh[:short]))
            self._num_loose = 0
            self._push_loose(fresh[short:])
        self._place[pages] = -1
        self._used[pages] = True
        np.subtract.at(self._loose_in_run, self._run_of[pages], 1)
        return pages

    def free_pages(self, pages: np.ndarray) -> None:
        """Give pages back. Raises `RuntimeError` on a page that is not in use or is named twice."""
        if np.count_nonzero(self._used[pages]) != pages.size:
            raise RuntimeError(f"pages freed that are not in use: {pages[~self._used[pages]].tolist()}")
        self._used[pages] = False
        self._push_loose(pages)
        runs = self._run_of[pages]
        np.add.at(self._loose_in_run, runs, 1)
        whole = runs[self._loose_in_run[runs] == self.run]
        if whole.size:
            self._mend(np.unique(whole))

    def alloc_slot(self) -> int | None:
        """A slot, or None when no whole run is free."""
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
        self._kind[slot] = _FREE
        self._runs[self._num_runs] = slot
        self._num_runs += 1

    def evacuate(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Free one broken run by moving its used pages to other broken runs: (old pages, new pages), same length.

        None with nothing changed when the loose pages elsewhere do not suffice. The caller copies the bytes and renames
        the pages it holds.
        """
        run = int(self._loose_in_run.argmax())
        count = self.run - int(self._loose_in_run[run])
        if self._kind[run] != _PAGES or self._num_loose < self.run:
            return None
        pages = run * self.run + self._in_run
        old, loose = pages[self._used[pages]], pages[~self._used[pages]]
        self._drop_loose(loose)
        self._loose_in_run[run] = 0
        new = self._loose[self._num_loose - count : self._num_loose].copy()
        self._drop_loose(new)
        self._used[new], self._used[old] = True, False
        np.subtract.at(self._loose_in_run, new // self.run, 1)
        self._free_runs(np.array([run], np.int64))
        return old, new

    def _break_runs(self, count: int) -> np.ndarray:
        """The pages of `count` free runs, which are broken from now on."""
        self._num_runs -= count
        runs = self._runs[self._num_runs : self._num_runs + count]
        self._kind[runs] = _PAGES
        self._loose_in_run[runs] = self.run
        return (runs[:, None] * self.run + self._in_run).reshape(-1)

    def _mend(self, runs: np.ndarray) -> None:
        """Make runs whole whose pages are all loose."""
        self._drop_loose((runs[:, None] * self.run + self._in_run).reshape(-1))
        self._loose_in_run[runs] = 0
        self._free_runs(runs)

    def _free_runs(self, runs: np.ndarray) -> None:
        self._kind[runs] = _FREE
        self._runs[self._num_runs : self._num_runs + runs.size] = runs
        self._num_runs += runs.size

    def _push_loose(self, pages: np.ndarray) -> None:
        start, end = self._num_loose, self._num_loose + pages.size
        places = self._counter[start:end]
        self._loose[start:end] = pages
        self._place[pages] = places
        if np.count_nonzero(self._place[pages] != places):
            raise RuntimeError(f"a page is named twice in {pages.tolist()}")
        self._num_loose = end

    def _drop_loose(self, pages: np.ndarray) -> None:
        """Take pages out of the middle of the stack: what lies on its top fills the holes."""
        places = self._place[pages]
        rest = self._num_loose - pages.size
        self._place[pages] = -1
        top = self._loose[rest : self._num_loose]
        movers = top[self._place[top] >= 0]
        holes = places[places < rest]
        self._loose[holes] = movers
        self._place[movers] = holes
        self._num_loose = rest
