"""The radix tree keeps its books: who names a page, however nodes come and go."""

from __future__ import annotations

import random

import numpy as np
import pytest

from k3hal.engine.cache.keys import NO_CONTEXT, UnitKeys
from k3hal.engine.cache.tree import Node, PrefixTree, below

from .cache_audit import audit_names

UNIT, PAGE_TOKENS, NUM_PAGES = 2, 8, 64


class Books:
    """A tree, and how often it says that it holds each page."""

    def __init__(self, unit: int = UNIT, page_tokens: int = PAGE_TOKENS) -> None:
        self.held = np.zeros(NUM_PAGES, np.int64)
        self.tree = PrefixTree(unit, page_tokens, NUM_PAGES, self._hold, self._drop)

    def _hold(self, pages: np.ndarray) -> None:
        self.held[pages] += 1

    def _drop(self, pages: np.ndarray) -> None:
        self.held[pages] -= 1

    def keep(self, token_ids: np.ndarray, pages: list[int]) -> Node:
        node = self.tree.insert(UnitKeys(NO_CONTEXT, self.tree.unit, b""), token_ids, np.array(pages))
        node.slot = 1
        return node

    def give_up(self, node: Node) -> None:
        node.slot = 0
        self.tree.prune(node)

    def check(self) -> None:
        audit_names(self.tree)
        named = np.zeros_like(self.held)
        for node in self.tree.nodes():
            named[node.pages] += 1
        assert (named == self.held).all()


def test_a_page_is_found_after_the_node_between_two_that_name_it_is_gone() -> None:
    """What moved out of sight in the nightly scripts 13152 and 14025.

    Two sequences compute the same prefix at the same time: one names page 5 above and below a node of the other's,
    which has a copy of its own. Both lower nodes go, and a stranger takes the number of the upper one of them.
    """
    books, text, other = Books(), np.arange(6), np.arange(10, 32)
    upper, between = books.keep(text[:2], [5]), books.keep(text[:4], [6])
    books.keep(other[:20], [20, 21, 22])
    lower = books.keep(text, [5])
    assert books.held[5] == 2
    number = between.number
    for node in (lower, between):
        books.give_up(node)
        books.check()
    assert books.keep(other, [20, 21, 22]).number == number
    books.tree.rename(5, 9)
    assert upper.pages.tolist() == [9]


@pytest.mark.parametrize(("unit", "page_tokens"), [(2, 8), (4, 4), (8, 4), (3, 5)])
def test_names_stay_known_whatever_comes_goes_and_moves(unit: int, page_tokens: int) -> None:
    rng = random.Random(unit)
    books, kept, shared = Books(unit, page_tokens), [], 0
    for _ in range(1500):
        roll = rng.random()
        if roll < 0.5:
            text = np.array([rng.choice([0, 0, 0, 1]) for _ in range(rng.randint(1, 20))])
            free = [page for page in range(NUM_PAGES) if not books.held[page]]
            pages = rng.sample(free, -(-text.size // page_tokens))
            for end in sorted(rng.sample(range(1, text.size + 1), min(3, text.size))):
                node = books.keep(text[:end], pages[: -(-end // page_tokens)])
                kept += [node] if node not in kept else []
            shared += len(books.tree.sharers)
        elif roll < 0.8 and kept:
            books.give_up(kept.pop(rng.randrange(len(kept))))
        else:
            old, new = (rng.choice(np.flatnonzero(books.held == 0)) if i else rng.randrange(NUM_PAGES) for i in (0, 1))
            books.held[int(new)], books.held[old] = books.held[old], 0
            books.tree.rename(int(old), int(new))
        while len(kept) > 8:
            books.give_up(kept.pop(0))
        books.check()
    assert shared > 100
    while kept:
        books.give_up(kept.pop())
    assert not list(below(books.tree.root)) and not books.held.any() and (books.tree.owner < 0).all()
