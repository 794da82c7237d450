"""The index: a radix tree over match units whose nodes name the pages of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from k3hal.engine.cache.keys import DIGEST_BYTES, UnitKeys

NO_SLOT = 0


class Node:
    """The tokens `[start, end)` of every prefix that passes here, the pages they lie in, and maybe a snapshot at `end`.

    `pages` int32 are those of the page indices from `start` // page tokens; the first may be shared with the parent,
    or be a copy of its last one. A branch covers whole units and has their `digests`; a tail has no children, covers
    less than a unit and has its own digest; `tails` holds those of a branch by their end, then digest. `slot` is the
    snapshot's, `entry` its place in the snapshot table.
    """

    __slots__ = ("children", "digests", "end", "entry", "number", "pages", "parent", "slot", "start", "tails")

    def __init__(self, parent: Node | None, start: int, end: int, digests: bytes, pages: np.ndarray) -> None:
        self.parent = parent
        self.start, self.end = start, end
        self.digests = digests
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.tails: dict[int, dict[bytes, Node]] = {}
        self.slot = NO_SLOT
        self.entry = self.number = -1

    @property
    def needed(self) -> bool:
        """Whether a snapshot is here or below; the KV of any other node serves nobody."""
        return bool(self.slot or self.children or self.tails or self.parent is None)


@dataclass(frozen=True, slots=True)
class Match:
    """How far a sequence is known. `node` is the deepest node with a snapshot at one of its prefixes, None without.

    `matched` tokens have their KV here, a whole number of units.
    """

    node: Node | None
    matched: int

    @property
    def cached(self) -> int:
        return self.node.end if self.node else 0


class PrefixTree:
    """Nodes by digest. Knows nothing of memory: `hold` and `drop` are told which pages a node names, or no longer.

    `numbered` holds the nodes by `Node.number`. `owner` int32 [num_pages] is the number of a node that names a page, -1
    without one; a page that others name too, where nodes begin or end inside it, has their numbers in `sharers`.
    """

    def __init__(
        self,
        unit: int,
        page_tokens: int,
        num_pages: int,
        hold: Callable[[np.ndarray], None],
        drop: Callable[[np.ndarray], None],
    ) -> None:
        self.unit, self.page_tokens = unit, page_tokens
        self.owner = np.full(num_pages, -1, np.int32)
        self.sharers: dict[int, list[int]] = {}
        self._shared = np.zeros(num_pages, bool)
        self._hold, self._drop = hold, drop
        self.numbered: list[Node | None] = []
        self._free_numbers: list[int] = []
        self.root = Node(None, 0, 0, b"", np.zeros(0, np.int32))

    def match(self, keys: UnitKeys, token_ids: np.ndarray, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens."""
        units = limit // self.unit
        path, at = self._walk(bytes(keys.chain(token_ids)), units)
        return Match(self._snapshot_on(path, at, keys, token_ids, limit), at * self.unit)

    def insert(self, keys: UnitKeys, token_ids: np.ndarray, pages: np.ndarray) -> Node:
        """The node that ends with exactly these tokens, made where missing of `pages`, those of the whole sequence."""
        units = token_ids.size // self.unit
        chain = bytes(keys.chain(token_ids))
        path, at = self._walk(chain, units)
        node = path[-1]
        if at * self.unit < node.end:
            node = self._split(node, at * self.unit)
        if at < units:
            first = chain[at * DIGEST_BYTES : units * DIGEST_BYTES]
            child = self._add(node, units * self.unit, first, pages)
            node.children[first[:DIGEST_BYTES]] = child
            node = child
        if token_ids.size == node.end:
            return node
        digest = keys.tail(token_ids)
        tails = node.tails.setdefault(token_ids.size, {})
        if digest not in tails:
            tails[digest] = self._add(node, token_ids.size, digest, pages)
        return tails[digest]

    def prune(self, node: Node) -> Node:
        """Take out `node` and what lies above it as far as nobody needs it; the deepest node that stays."""
        while not node.needed:
            parent = node.parent
            assert parent is not None
            self._detach(node, parent)
            self._disclaim(node, node.pages)
            self._forget(node)
            self._drop(node.pages)
            node = parent
        if len(node.children) == 1 and not node.tails and not node.slot and node.parent is not None:
            return self._merge(node)
        return node

    def rename(self, old: int, new: int) -> None:
        """A page moved: every node that names it does so under its new number, which nobody has yet."""
        first = int(self.owner[old])
        if first < 0:
            return
        sharers = self.sharers.pop(old, [])
        for number in (first, *sharers):
            node = self.numbered[number]
            assert node is not None
            node.pages[node.pages == old] = new
        self.owner[old], self.owner[new] = -1, first
        if sharers:
            self.sharers[new] = sharers
            self._shared[old], self._shared[new] = False, True

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        return (node for node in self.numbered if node is not None)

    def path_pages(self, node: Node) -> np.ndarray:
        """The pages of the prefix that ends with `node`, int32, one for each page begun."""
        pages = np.zeros(-(-node.end // self.page_tokens), np.int32)
        step: Node | None = node
        end = pages.size
        while step is not None and step.pages.size:
            first = step.start // self.page_tokens
            if first < end:
                pages[first:end] = step.pages[: end - first]
                end = first
            step = step.parent
        return pages

    def _walk(self, chain: bytes, units: int) -> tuple[list[Node], int]:
        """The nodes a chain of digests passes, root first, and how many units it shares with them."""
        node, at = self.root, 0
        path = [node]
        size = DIGEST_BYTES
        while at < units:
            child = node.children.get(chain[at * size : (at + 1) * size])
            if child is None:
                break
            node = child
            path.append(node)
            length = min(node.end // self.unit, units) - at
            shared = common_digests(node.digests, chain[at * size : (at + length) * size])
            at += shared
            if at * self.unit < node.end:
                break
        return path, at

    def _snapshot_on(self, path: list[Node], at: int, keys: UnitKeys, token_ids: np.ndarray, limit: int) -> Node | None:
        for node in reversed(path):
            if node.end > at * self.unit:
                continue
            for end in sorted((end for end in node.tails if end <= limit), reverse=True):
                tail = node.tails[end].get(keys.tail(token_ids[:end]))
                if tail is not None and tail.slot:
                    return tail
            if node.slot:
                return node
        return None

    def _add(self, parent: Node, end: int, digests: bytes, pages: np.ndarray) -> Node:
        first, last = parent.end // self.page_tokens, -(-end // self.page_tokens)
        node = Node(parent, parent.end, end, digests, pages[first:last].astype(np.int32))
        self._number(node)
        self._hold(node.pages)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """A new node for the tokens of `node` before `at`; `node` keeps the rest and all that hangs on it."""
        parent = node.parent
        assert parent is not None
        cut = (at - node.start) // self.unit * DIGEST_BYTES
        first = node.start // self.page_tokens
        upper = Node(parent, node.start, at, node.digests[:cut], node.pages[: -(-at // self.page_tokens) - first])
        lower = node.pages[at // self.page_tokens - first :]
        self._disclaim(node, node.pages)
        if at % self.page_tokens and lower.size:
            self._hold(lower[:1])
        parent.children[node.digests[:DIGEST_BYTES]] = upper
        node.parent, node.start, node.digests, node.pages = upper, at, node.digests[cut:], lower.copy()
        upper.children[node.digests[:DIGEST_BYTES]] = node
        self._number(upper)
        self._claim(node, node.pages)
        return upper

    def _merge(self, node: Node) -> Node:
        """Join a node that only leads to one child with it; the child stays."""
        (child,) = node.children.values()
        kept = node.pages
        self._disclaim(node, kept)
        if child.start % self.page_tokens and kept.size:
            self._drop(kept[-1:])
            kept = kept[:-1]
        child.parent, child.start = node.parent, node.start
        child.digests = node.digests + child.digests
        child.pages = np.concatenate((kept, child.pages))
        assert child.parent is not None
        child.parent.children[child.digests[:DIGEST_BYTES]] = child
        self._claim(child, kept)
        self._forget(node)
        return child

    def _number(self, node: Node) -> None:
        if self._free_numbers:
            node.number = self._free_numbers.pop()
            self.numbered[node.number] = node
        else:
            node.number = len(self.numbered)
            self.numbered.append(node)
        self._claim(node, node.pages)

    def _claim(self, node: Node, pages: np.ndarray) -> None:
        """`node` names pages that it did not."""
        taken = self.owner[pages] >= 0
        self.owner[pages[~taken]] = node.number
        for page in pages[taken].tolist():
            self.sharers.setdefault(page, []).append(node.number)
            self._shared[page] = True

    def _disclaim(self, node: Node, pages: np.ndarray) -> None:
        """`node` names pages no longer; one of the others that do, if there are any, becomes their owner."""
        shared = self._shared[pages]
        self.owner[pages[~shared]] = -1
        for page in pages[shared].tolist():
            sharers = self.sharers[page]
            if self.owner[page] == node.number:
                self.owner[page] = sharers.pop()
            else:
                sharers.remove(node.number)
            if not sharers:
                del self.sharers[page]
                self._shared[page] = False

    def _forget(self, node: Node) -> None:
        self.numbered[node.number] = None
        self._free_numbers.append(node.number)
        node.number = -1

    def _detach(self, node: Node, parent: Node) -> None:
        if node.end % self.unit:
            tails = parent.tails[node.end]
            del tails[node.digests]
            if not tails:
                del parent.tails[node.end]
        else:
            del parent.children[node.digests[:DIGEST_BYTES]]


def below(node: Node) -> Iterator[Node]:
    """The nodes right below."""
    yield from node.children.values()
    for tails in node.tails.values():
        yield from tails.values()


def common_digests(left: bytes, right: bytes) -> int:
    """Digests that two runs share at their start. In a chain the first difference makes all later ones differ."""
    length = min(len(left), len(right)) // DIGEST_BYTES
    if left[: length * DIGEST_BYTES] == right[: length * DIGEST_BYTES]:
        return length
    low, high = 0, length - 1
    while low < high:
        middle = (low + high) // 2
        place = slice(middle * DIGEST_BYTES, (middle + 1) * DIGEST_BYTES)
        if left[place] == right[place]:
            low = middle + 1
        else:
            high = middle
    return low
