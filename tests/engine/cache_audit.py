"""Whether a prefix cache's own books agree with each other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.cache.tree import PrefixTree


def loads_under_way(cache: PrefixCache) -> list[Any]:
    """The prefixes that hold memory while they come from the external tier."""
    tier = cache._tier
    if tier is None:
        return []
    held = {id(load): load for load in (*tier._loads.values(), *tier._moving.values())}
    return [load for load in held.values() if load.stage.name != "OVER"]


def audit(cache: PrefixCache) -> None:
    """Every page is held as often as nodes and rows name it, and no memory is lost or held twice."""
    pool, store, tree, table = cache.pool, cache._store, cache.index.tree, cache.index.table
    named, held = np.zeros(pool.num_pages, np.int64), np.zeros(pool.num_pages, np.int64)
    slots = [int(slot) for slot in cache.slots if slot]
    loads = loads_under_way(cache)
    for load in loads:
        slots += [load.state_run, *load.kv_runs] if load.state_run else []
        held[load.shared] += 1
    rows_with = len(slots)
    for node in tree.nodes():
        named[node.pages] += 1
        assert node.needed, "a node that serves nobody"
        assert node.parent is not None
        assert node.parent.end == node.start
        if node.slot:
            slots.append(node.slot)
            assert table.nodes[node.entry] is node
            above = node.parent
            while above.parent is not None and not above.slot:
                above = above.parent
            assert table.gap[node.entry] == node.end - (above.end if above.slot else 0)
    for row, count in enumerate(cache.num_pages.tolist()):
        held[cache.page_table[row, :count]] += 1
    assert (named == store._index).all()
    assert (held == store._rows).all()
    assert store.row_pages == np.count_nonzero(held) + rows_with * pool.run
    assert len(set(slots)) == len(slots), "a slot serves two owners"
    used = (named > 0) | (held > 0)
    assert not any(used[slot * pool.run : (slot + 1) * pool.run].any() for slot in slots), "pages inside a slot"
    assert pool.num_free_pages == pool.num_pages - pool.run - np.count_nonzero(used) - len(slots) * pool.run
    assert len(table) == len(slots) - rows_with
    audit_names(tree)


def audit_names(tree: PrefixTree) -> None:
    """The tree knows exactly the nodes that name a page."""
    names: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(tree.numbered):
        if node is not None:
            assert node.number == number
            for page in node.pages.tolist():
                names[page].append(number)
    known = {page: [number] for page, number in enumerate(tree.owner.tolist()) if number >= 0}
    for page, numbers in tree.sharers.items():
        assert numbers, "a page is shared with nobody"
        known[page] = [*known[page], *numbers]
    assert {page: sorted(numbers) for page, numbers in known.items()} == names
    assert np.flatnonzero(tree._shared).tolist() == sorted(tree.sharers)
