"""The page pool never hands out memory twice, never loses any, and keeps null to itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3hal.engine.cache.pool import PagePool


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_runs=st.integers(1, 12), run=st.integers(1, 6))
    def start(self, num_runs: int, run: int) -> None:
        self.pool = PagePool(num_runs, run)
        self.run = run
        self.allocatable = (num_runs - 1) * run
        self.held: list[np.ndarray] = []
        self.slots: list[int] = []

    def in_use(self) -> list[int]:
        pages = [int(p) for held in self.held for p in held]
        for slot in self.slots:
            pages.extend(range(slot * self.run, (slot + 1) * self.run))
        return pages

    @rule(count=st.integers(0, 20))
    def alloc_pages(self, count: int) -> None:
        free = self.allocatable - len(self.in_use())
        pages = self.pool.alloc_pages(count)
        assert (pages is None) == (count > free), "pages are refused exactly when there are too few"
        if pages is not None:
            assert len(pages) == count
            self.held.append(pages)

    @rule()
    def alloc_slot(self) -> None:
        used = set(self.in_use())
        whole = [r for r in range(1, self.pool.num_runs) if not used & set(range(r * self.run, (r + 1) * self.run))]
        slot = self.pool.alloc_slot()
        assert (slot is None) == (not whole), "a run none of whose pages is in use serves as a slot"
        if slot is not None:
            assert slot in whole
            self.slots.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some_pages(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        order = np.array(data.draw(st.permutations(range(len(held)))), int)
        cut = data.draw(st.integers(0, len(held)))
        self.pool.free_pages(held[order[:cut]])
        if cut < len(held):
            self.held.append(held[order[cut:]])

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free_slot(self, data: st.DataObject) -> None:
        self.pool.free_slot(self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1))))

    @rule()
    def evacuate(self) -> None:
        before, runs = set(self.in_use()), self.pool.num_free_runs
        moved = self.pool.evacuate()
        if moved is None:
            loose = self.pool.num_free_pages - runs * self.run
            assert loose < self.run, "refused though the loose pages make up a run"
            return
        old, new = (pages.tolist() for pages in moved)
        assert set(old) <= before
        assert not set(new) & before
        assert self.pool.num_free_runs == runs + 1
        renamed = dict(zip(old, new, strict=True))
        self.held = [np.array([renamed.get(p, p) for p in held.tolist()], int) for held in self.held]

    @invariant()
    def nothing_lost_or_shared(self) -> None:
        used = self.in_use()
        assert len(used) == len(set(used)), "a page serves two owners"
        assert all(page >= self.run for page in used), "the null run was handed out"
        assert self.pool.num_free_pages == self.allocatable - len(used)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pages_come_from_broken_runs_first() -> None:
    pool = PagePool(10, 4)
    first = pool.alloc_pages(1)
    assert first is not None
    more = pool.alloc_pages(3)
    assert more is not None
    assert {int(p) // 4 for p in (*first, *more)} == {int(first[0]) // 4}


@pytest.mark.parametrize("wrong", [[4, 4], [5], [0], [39]])
def test_a_wrong_free_is_refused(wrong: list[int]) -> None:
    pool = PagePool(10, 4)
    pages = pool.alloc_pages(1)
    assert pages is not None
    assert pages.tolist() == [4]
    with pytest.raises(RuntimeError, match=r"not in use|twice"):
        pool.free_pages(np.array(wrong))


def test_a_slot_freed_twice_is_refused() -> None:
    pool = PagePool(3, 2)
    slot = pool.alloc_slot()
    assert slot is not None
    pool.free_slot(slot)
    with pytest.raises(RuntimeError, match="not in use"):
        pool.free_slot(slot)
