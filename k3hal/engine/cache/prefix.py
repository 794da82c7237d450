"""The prefix cache: running sequences, and what they leave behind for later ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

import numpy as np

from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.index import PrefixIndex
from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.cache.keys import DIGEST_BYTES, NO_CONTEXT, PrefixContext, PrefixNames, UnitKeys
from k3hal.engine.cache.policy import Kind, PromptFacts, RetentionPolicy
from k3hal.engine.cache.pool import PagePool
from k3hal.engine.cache.stats import CacheStats, Lookup, label_tokens
from k3hal.engine.cache.stops import RowStops
from k3hal.engine.cache.store import PageStore
from k3hal.engine.cache.tree import Match, Node, common_digests
from k3hal.engine.tier.interface import Connector, TierStats, TransferDone, Transfers
from k3hal.engine.tier.session import DEFAULT_TIMEOUT, TierSession


class PrefixCache:
    """`SequenceCache` whose sequences start from what earlier ones computed.

    Everything lies in one arena: the pages and slots of rows, and of the index what no row needs. Rows come first;
    what the index holds beside them is given up, least valuable first, when memory runs out. A hit copies the snapshot
    into the row's own slot and the page it ends in, if it ends inside one, into a page of the row's own, so that
    nobody ever writes what another may read. With a `connector` what the index keeps is stored outside too, and comes
    back into the index before a sequence that begins so is admitted.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        num_runs: int,
        max_rows: int,
        max_tokens: int,
        *,
        policy: RetentionPolicy,
        match_unit: int = 128,
        seed: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        connector: Connector | None = None,
        connector_timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.geometry, self.policy = geometry, policy
        self.page_tokens, self.match_unit = geometry.page_tokens, match_unit
        self.stats = CacheStats()
        self.page_table = np.zeros((max_rows, max(geometry.pages_for(max_tokens), 1)), np.int32)
        self.num_pages = np.zeros(max_rows, np.int32)
        self.slots = np.zeros(max_rows, np.int32)
        self._stops = RowStops(max_rows)
        self.next_stop = self._stops.next
        self._seed = secrets.token_bytes(32) if seed is None else seed
        self._store = PageStore(num_runs, geometry.pages_per_slot)
        self.index = PrefixIndex(
            geometry, self._store, policy, match_unit, self.stats, clock, page_moved=self._rename_in_rows
        )
        self._tier: TierSession | None = None
        if connector is not None:
            self._tier = TierSession(connector, self.index, self._store, clock, connector_timeout)
        self._keys: list[UnitKeys | None] = [None] * max_rows
        self._prompts: list[PromptFacts | None] = [None] * max_rows
        self._origin: list[list[Node]] = [[] for _ in range(max_rows)]

    @property
    def pool(self) -> PagePool:
        return self._store.pool

    @property
    def usage(self) -> float:
        total = self.pool.num_pages - self.pool.run
        return self._store.row_pages / total if total else 0.0

    @property
    def cached_usage(self) -> float:
        """Fraction of the memory that is held for later sequences only."""
        return self.pool.usage - self.usage

    @property
    def tier_stats(self) -> TierStats | None:
        return self._tier.stats if self._tier else None

    def use(self, policy: RetentionPolicy) -> None:
        """Keep by another policy from now on. What there is stays until that one gives it up."""
        self.policy = self.index.policy = policy

    def longest_sequence(self) -> int:
        table = self.page_table.shape[1] * self.page_tokens
        if not self.geometry.has_kv:
            return table
        return min(max(self.pool.num_runs - 2, 0) * self.pool.run * self.page_tokens, table)

    def keys(self, context: PrefixContext = NO_CONTEXT) -> UnitKeys:
        """The names of one sequence's prefixes, to be kept with it so that none is computed twice."""
        return UnitKeys(context, self.match_unit, self._seed)

    def lookup(
        self, token_ids: np.ndarray, context: PrefixContext = NO_CONTEXT, keys: UnitKeys | None = None
    ) -> Lookup:
        """What `admit` would find now."""
        keys = keys or self.keys(context)
        return self._explain(token_ids, keys, self._match(token_ids, keys))

    def admit(
        self,
        row: int,
        token_ids: np.ndarray,
        reserve_pages: int = 0,
        context: PrefixContext = NO_CONTEXT,
        keys: UnitKeys | None = None,
        *,
        resumed: bool = False,
    ) -> int | None:
        if self.slots[row]:
            raise RuntimeError(f"row {row} already holds slot {self.slots[row]}")
        keys = keys or self.keys(context)
        match = self._match(token_ids, keys)
        path = self.index.tree.path_pages(match.node) if match.node and self.geometry.has_kv else self.page_table[0, :0]
        shared = path[: match.cached // self.page_tokens]
        pages = self.geometry.pages_for(token_ids.size)
        fresh = pages - shared.size
        if pages > self.page_table.shape[1] or not self._fits(shared, fresh + self.pool.run + reserve_pages):
            return None
        found = self._explain(token_ids, keys, match)
        self.leave(keys)
        self._count(found, resumed=resumed)
        facts = self._facts(token_ids, keys, match)
        prompt = 0 if resumed else token_ids.size
        self.index.seen.note(keys.chain(token_ids), token_ids.size // self.match_unit, prompt)
        self._keys[row] = keys
        if not keys.context.private:
            self._prompts[row] = facts
            self._stops.begin(row, found.cached, token_ids.size, self.policy.stops(facts))
            self._arm(row, found.cached)
        self._occupy(row, match.node, path, shared, fresh)
        return found.cached

    def _fits(self, shared: np.ndarray, more: int) -> bool:
        """Whether a row can hold `shared` pages and `more` others.

        When nothing runs that could end, prefixes on their way from outside give back what is held for them.
        """
        if self._store.room < self._store.newly_held(shared) + more and self._tier and not self.slots.any():
            self._tier.give_back()
        return self._store.room >= self._store.newly_held(shared) + more

    def defer(self, token_ids: np.ndarray, keys: UnitKeys) -> bool:
        if keys.context.private or not self.policy.shares:
            return False
        due = max((self._due(row, token_ids, keys) for row in self._stops.under_way()), default=0)
        if due > 0 and due > self._match(token_ids, keys).cached:
            return True
        reserve = int(np.count_nonzero(self.slots))
        return self._tier is not None and self._tier.waits(
            token_ids, keys, lambda: self._match(token_ids, keys), reserve
        )

    def leave(self, keys: UnitKeys) -> None:
        if self._tier:
            self._tier.leave(keys)

    def expect(self, row: int, token_ids: np.ndarray, keys: UnitKeys) -> None:
        if self.policy.shares and not keys.context.private and row in self._stops.under_way():
            self._due(row, token_ids, keys)

    def chunk_end(self, row: int, start: int, end: int) -> int:
        end, cut = self._stops.chunk_end(row, start, end)
        self.stats.stops += cut
        return end

    def reach(self, row: int, token_ids: np.ndarray) -> None:
        position = token_ids.size
        if position < self.next_stop[row]:
            return
        if position == self.next_stop[row]:
            kind = self._stops.kind(row, position)
            keys = self._keys[row]
            assert keys is not None
            node = self.index.snapshot(keys, token_ids, self._pages(row, position), int(self.slots[row]), kind)
            if node is not None:
                self._origin[row].append(node)
                self._offer(keys, token_ids, self._pages(row, position), node.slot)
        self._arm(row, position)

    def extend(self, row: int, num_tokens: int) -> bool:
        held = int(self.num_pages[row])
        missing = self.geometry.pages_for(num_tokens) - held
        if missing <= 0:
            return True
        if missing > self._store.room or missing + held > self.page_table.shape[1]:
            return False
        self._add_pages(row, missing)
        return True

    def release(self, row: int, token_ids: np.ndarray | None = None, *, preempted: bool = False) -> None:
        if not self.slots[row]:
            raise RuntimeError(f"row {row} holds nothing")
        if token_ids is None:
            self._withdraw(row)
        elif not token_ids.size or not self._keep(row, token_ids, preempted=preempted):
            self._store.free_slot(int(self.slots[row]), row=True)
        self._store.drop_from_row(self.page_table[row, : self.num_pages[row]].copy())
        self.num_pages[row] = self.slots[row] = 0
        self._stops.end(row)
        self._keys[row] = self._prompts[row] = None
        self._origin[row] = []

    def forget(self) -> None:
        """Drop whatever no row holds: it may not be what its name says. Copies still owed to the index are void."""
        if self._tier:
            self._tier.reset()
        self.index.clear()

    def take_copies(self) -> PageCopies:
        copies = self._store.take_copies()
        self.stats.pages_copied += len(copies)
        return copies

    @property
    def transferring(self) -> bool:
        return self._tier is not None and self._tier.busy

    def take_transfers(self) -> Transfers:
        return self._tier.take() if self._tier else Transfers()

    def transferred(self, ended: Iterable[TransferDone]) -> None:
        if self._tier:
            self._tier.done(ended)

    def pause(self, seconds: float) -> None:
        if self._tier:
            self._tier.pause(seconds)

    def close(self) -> None:
        if self._tier:
            self._tier.close()

    def _match(self, token_ids: np.ndarray, keys: UnitKeys) -> Match:
        """The last token is always computed, for its logits."""
        return Match(None, 0) if keys.context.private else self.index.match(keys, token_ids, token_ids.size - 1)

    def _explain(self, token_ids: np.ndarray, keys: UnitKeys, match: Match) -> Lookup:
        units = token_ids.size // self.match_unit
        seen = self.index.seen.known(keys.chain(token_ids), units) * self.match_unit
        return label_tokens(token_ids.size, match.cached, match.matched, seen, self.match_unit)

    def _count(self, found: Lookup, *, resumed: bool) -> None:
        if resumed:
            self.stats.count_resumed(found)
        else:
            self.stats.count(found)

    def _facts(self, token_ids: np.ndarray, keys: UnitKeys, match: Match) -> PromptFacts:
        chain = keys.chain(token_ids)
        seen = self.index.seen.known(chain, token_ids.size // self.match_unit)
        return PromptFacts(
            num_tokens=token_ids.size,
            cached=match.cached,
            matched=match.matched,
            seen=seen * self.match_unit,
            donor=self.index.seen.donor(chain, seen),
            boundaries=keys.context.boundaries,
            names=PrefixNames(keys, token_ids),
        )

    def _occupy(self, row: int, node: Node | None, path: np.ndarray, shared: np.ndarray, fresh: int) -> None:
        """Give a row its memory, and write down what must be copied into it. There is room."""
        store = self._store
        partial = state = None
        if node is not None:
            self.index.touch(node)
            self._origin[row].append(node)
            state = store.slot_source(node.slot)
            if node.end % self.page_tokens and path.size:
                partial = store.page_source(int(path[shared.size]))
            store.hold_in_row(shared)
            self.page_table[row, : shared.size] = shared
            self.num_pages[row] = shared.size
        # From here on the source of either copy may be given up: copies read what lay there before the step.
        made = self.index.make_room(fresh, slot=True)
        slot = store.take_slot(row=True)
        assert made and slot is not None
        self.slots[row] = slot
        self._add_pages(row, fresh)
        if state is not None:
            store.copy_slot(state, slot)
        if partial is not None:
            store.copy_page(partial, int(self.page_table[row, shared.size]))

    def _add_pages(self, row: int, count: int) -> None:
        if not count:
            return
        self.index.make_room(count, slot=False)
        pages = self.pool.alloc_pages(count)
        assert pages is not None
        held = self.num_pages[row]
        self._store.hold_in_row(pages)
        self.page_table[row, held : held + count] = pages
        self.num_pages[row] = held + count

    def _keep(self, row: int, token_ids: np.ndarray, *, preempted: bool) -> bool:
        """Hand a row's slot over to the index, if the policy wants what is in it."""
        keys = self._keys[row]
        assert keys is not None
        self.index.seen.note(keys.chain(token_ids), token_ids.size // self.match_unit)
        facts = self._prompts[row]
        if facts is not None:
            self.policy.ending(self.index.table, facts, PrefixNames(keys, token_ids), token_ids.size)
        if keys.context.private or not self.policy.keeps_end(token_ids.size, preempted=preempted):
            return False
        kind = Kind.PREEMPTED if preempted else Kind.SEQUENCE_END
        pages, slot = self._pages(row, token_ids.size), int(self.slots[row])
        if not self.index.adopt(keys, token_ids, pages, slot, kind):
            return False
        self.stats.snapshots_kept_at_end += 1
        self._offer(keys, token_ids, pages, slot)
        return True

    def _offer(self, keys: UnitKeys, token_ids: np.ndarray, pages: np.ndarray, slot: int) -> None:
        """Let the external tier have what the index has just begun to keep."""
        if self._tier:
            self._tier.offer(PrefixNames(keys, token_ids), token_ids.size, pages, slot)

    def _withdraw(self, row: int) -> None:
        """Nothing a failed row computed, or started from, may serve another."""
        self._store.free_slot(int(self.slots[row]), row=True)
        for node in self._origin[row]:
            if self._tier:
                self._tier.withdraw(node.digests[-DIGEST_BYTES:])
            if node.number >= 0:
                self.index.withdraw(node)

    def _due(self, row: int, token_ids: np.ndarray, keys: UnitKeys) -> int:
        """The longest prefix of `token_ids` whose state a row's prompt is still to come by; the row will stop there."""
        own = self._keys[row]
        assert own is not None
        size = min(token_ids.size - 1, self._stops.goal(row) - 1) // self.match_unit * DIGEST_BYTES
        shared = common_digests(own.known()[:size], bytes(keys.chain(token_ids)[:size])) * self.match_unit
        return self._stops.due(row, shared) if shared else 0

    def _arm(self, row: int, position: int) -> None:
        self._stops.arm(row, position, lambda at: self.policy.next_decode_stop(at, self.match_unit))

    def _pages(self, row: int, num_tokens: int) -> np.ndarray:
        return self.page_table[row, : self.geometry.pages_for(num_tokens)]

    def _rename_in_rows(self, old: np.ndarray, new: np.ndarray) -> None:
        width = int(self.num_pages.max(initial=0))
        table = self.page_table[:, :width]
        renamed = np.arange(self.pool.num_pages, dtype=np.int32)
        renamed[old] = new
        table[:] = renamed[table]
        if self._tier:
            self._tier.renamed(renamed)
