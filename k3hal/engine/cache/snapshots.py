"""The snapshots that exist, as columns, so that a policy can weigh all of them at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from k3hal.engine.cache.tree import NO_SLOT, Node, below

NONE = -1
_COLUMNS = (
    "live", "position", "gap", "kv_pages", "parent", "kind", "used", "score",
)  # fmt: skip


class SnapshotTable:
    """One entry a snapshot; `live` says which entries mean anything.

    `position` tokens before the snapshot; `gap` how many of them would be computed anew without it, the nearest one
    before it (`parent`, an entry or -1) staying; `kv_pages` pages that only it needs; `kind` what it was taken for
    (`policy.Kind`); `used` seconds, when it was taken or a prompt last began with it; `score` is the policy's verdict.
    `run` is the pages of a snapshot's state.
    """

    def __init__(self, run: int) -> None:
        self.run = run
        self.nodes: list[Node | None] = []
        self.live = np.zeros(0, bool)
        self.position = np.zeros(0, np.int64)
        self.gap = np.zeros(0, np.int64)
        self.kv_pages = np.zeros(0, np.int64)
        self.parent = np.zeros(0, np.int64)
        self.kind = np.zeros(0, np.int64)
        self.used = np.zeros(0, np.float64)
        self.score = np.zeros(0, np.float64)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.nodes) - len(self._free)

    def entries(self) -> np.ndarray:
        """Every live entry, int64, in no order that means anything."""
        return np.flatnonzero(self.live)

    def add(self, node: Node, kind: int, now: float) -> int:
        """An entry for the snapshot at the end of `node`, which has its slot already."""
        if not self._free:
            self._grow()
        entry = self._free.pop()
        self.nodes[entry], node.entry = node, entry
        self.live[entry] = True
        self.position[entry], self.kind[entry], self.used[entry] = node.end, kind, now
        parent = _snapshot_above(node)
        self._link(entry, parent.entry if parent else NONE)
        for later in _snapshots_below(node):
            self._link(later.entry, entry)
        self.weigh(node)
        if parent:
            self.weigh(parent)
        return entry

    def remove(self, entry: int) -> Node:
        """Forget an entry; its node. The caller then prunes the tree and weighs what changed there."""
        node = self.nodes[entry]
        assert node is not None
        parent = int(self.parent[entry])
        for child in np.flatnonzero((self.parent == entry) & self.live).tolist():
            self._link(child, parent)
        self.nodes[entry] = None
        node.entry = NONE
        self.live[entry] = False
        self._free.append(entry)
        return node

    def weigh(self, node: Node) -> None:
        """Count anew the pages that only the snapshot at `node` needs; nothing where there is none."""
        if node.slot == NO_SLOT:
            return
        pages, step = 0, node
        if not node.children and not node.tails:
            pages += node.pages.size
            step = node.parent
            while step is not None and step.parent is not None and not step.slot and dependents(step) == 1:
                pages += step.pages.size
                step = step.parent
        self.kv_pages[node.entry] = pages

    def _link(self, entry: int, parent: int) -> None:
        self.parent[entry] = parent
        self.gap[entry] = self.position[entry] - (self.position[parent] if parent != NONE else 0)

    def _grow(self) -> None:
        size, more = len(self.nodes), max(len(self.nodes), 64)
        self.nodes += [None] * more
        self._free += range(size + more - 1, size - 1, -1)
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros(more, column.dtype))))


def dependents(node: Node) -> int:
    """Nodes right below."""
    return len(node.children) + sum(len(same) for same in node.tails.values())


def _snapshot_above(node: Node) -> Node | None:
    above = node.parent
    while above is not None and not above.slot:
        above = above.parent
    return above


def _snapshots_below(node: Node) -> Iterator[Node]:
    """The first snapshots on every way down."""
    stack = [node]
    while stack:
        step = stack.pop()
        for child in below(step):
            if child.slot:
                yield child
            else:
                stack.append(child)
