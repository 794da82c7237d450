"""The cache's side of the external tier: what to store, what to wait for, and where what comes is put."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

import numpy as np

from k3hal.engine.cache.index import PrefixIndex
from k3hal.engine.cache.keys import PrefixNames, UnitKeys
from k3hal.engine.cache.policy import Kind
from k3hal.engine.cache.store import PageStore
from k3hal.engine.cache.tree import Match
from k3hal.engine.tier.interface import Connector, Fetched, PageTransfer, TransferDone, Transfers

DEFAULT_TIMEOUT = 10.0
"""Seconds that a sequence waits for what the tier has of it; then it is computed."""


class _Stage(Enum):
    FETCHING = auto()
    MOVING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class _Load:
    """A prefix on its way from the tier into the index, and the memory that is held for it meanwhile.

    `shared` int32 are the index's pages it builds on, in the page table's order; they may be moved. `kv_runs` and
    `state_run` are runs of its own, as slots are: those are never moved, so that what comes late comes to its own.
    """

    keys: UnitKeys
    token_ids: np.ndarray
    key: bytes
    cached: int
    deadline: float
    shared: np.ndarray
    ticket: int = 0
    stage: _Stage = _Stage.FETCHING
    waiting: int = 1
    void: bool = False
    end: int = 0
    epoch: int = 0
    num_kv: int = 0
    kv_runs: list[int] = field(default_factory=list)
    state_run: int = 0


class TierSession:
    """Between a prefix cache and a connector.

    A sequence for which the tier has a longer prefix than the index waits, and holds up nobody, until that prefix is in
    the index or known not to come. So whatever happens to it on its way, the worst is that it is computed.
    """

    def __init__(
        self,
        connector: Connector,
        index: PrefixIndex,
        store: PageStore,
        clock: Callable[[], float],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._connector, self._index, self._store = connector, index, store
        self._clock, self._timeout = clock, timeout
        self.shape, self.stats = connector.shape, connector.stats
        self._epochs = count(1)
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, int] = {}
        self._moving: dict[int, _Load] = {}
        self._new_stores: list[PageTransfer] = []
        self._new_loads: list[PageTransfer] = []

    @property
    def busy(self) -> bool:
        """Whether anything is owed to the next step, moves, or is waited for."""
        return bool(self._stores or self._moving or any(load.stage != _Stage.OVER for load in self._loads.values()))

    def offer(self, names: PrefixNames, end: int, pages: np.ndarray, slot: int) -> None:
        """The first `end` tokens and their state became known to the index, in `pages` and `slot`: store them too."""
        room = self._connector.reserve(names, end)
        if room is None:
            return
        sources = [self._store.page_source(page) for page in pages[room.first_page :].tolist()]
        state = self._pages_of(self._store.slot_source(slot))
        epoch = next(self._epochs)
        self._stores[epoch] = room.ticket
        device = np.concatenate((np.array(sources, np.int64), state))
        self._new_stores.append(PageTransfer(epoch, device, room.host))

    def waits(self, token_ids: np.ndarray, keys: UnitKeys, match: Callable[[], Match], reserve: int) -> bool:
        """Whether a sequence better waits for the tier. `match` says what the index has of it.

        `reserve` pages must stay free when memory is taken for it.
        """
        load = self._loads.get(id(keys))
        if load is None:
            load = self._loads[id(keys)] = self._begin(token_ids, keys, match())
        if load.stage == _Stage.FETCHING:
            self._look(load, token_ids.size, reserve)
        elif load.stage == _Stage.MOVING and self._clock() > load.deadline:
            # Its memory stays held until it ends, but nobody waits for it.
            self._loads[id(keys)] = _Load(keys, token_ids, b"", load.cached, 0.0, load.shared[:0], stage=_Stage.OVER)
            self.stats.failures["timeout"] += 1
        return self._loads[id(keys)].stage != _Stage.OVER

    def leave(self, keys: UnitKeys) -> None:
        """The sequence waits no longer."""
        load = self._loads.pop(id(keys), None)
        if load is None:
            return
        load.waiting -= 1
        if not load.waiting and load.stage == _Stage.FETCHING:
            self._end(load)

    def give_back(self) -> None:
        """Memory is needed more than the prefixes that are still being fetched: who waits for one is computed."""
        for load in list(self._loads.values()):
            if load.stage == _Stage.FETCHING:
                self._fail(load, "no_room")

    def take(self) -> Transfers:
        """The movements owed since the last call."""
        taken = Transfers(tuple(self._new_stores), tuple(self._new_loads))
        self._new_stores, self._new_loads = [], []
        return taken

    def done(self, ended: Iterable[TransferDone]) -> None:
        for end in ended:
            ticket, load = self._stores.pop(end.epoch, None), self._moving.pop(end.epoch, None)
            if ticket is not None:
                self._connector.commit(ticket, ok=end.ok)
            elif load is not None:
                self._arrived(load, ok=end.ok)
            else:
                self.stats.stale += 1

    def withdraw(self, key: bytes) -> None:
        """What is stored under a name may be wrong."""
        self._connector.discard(key)

    def reset(self) -> None:
        """Memory may hold anything: what is owed is void, and what moves is of no use when it ends."""
        for transfer in self._new_stores:
            self._connector.commit(self._stores.pop(transfer.epoch), ok=False)
        for transfer in self._new_loads:
            self._arrived(self._moving.pop(transfer.epoch), ok=False)
        self._new_stores, self._new_loads = [], []
        for load in list(self._loads.values()):
            if load.stage == _Stage.FETCHING:
                self._fail(load, "transfer")
        for load in self._moving.values():
            load.void = True

    def renamed(self, names: np.ndarray) -> None:
        """Pages moved: `names` int32 [num_pages] are the new numbers of all."""
        for load in (*self._loads.values(), *self._moving.values()):
            if load.stage != _Stage.OVER:
                load.shared = names[load.shared]

    def pause(self, seconds: float) -> None:
        self._connector.wait(seconds)

    def close(self) -> None:
        self._connector.close()

    def _begin(self, token_ids: np.ndarray, keys: UnitKeys, match: Match) -> _Load:
        names, cached = PrefixNames(keys, token_ids), match.cached
        self.stats.queries += token_ids.size - cached
        key = self._connector.find(names, token_ids.size - 1, cached)
        none = np.zeros(0, np.int32)
        load = _Load(keys, token_ids, key or b"", cached, self._clock() + self._timeout, none)
        if key is None:
            load.stage = _Stage.OVER
            return load
        for other in self._loads.values():
            if key and other.key == key and other.stage != _Stage.OVER:
                other.waiting += 1
                return other
        ticket = self._connector.fetch(names, token_ids.size - 1, cached)
        if ticket is None:
            self._give_up(load, "no_room")
            return load
        load.ticket = ticket
        if match.node is not None and self.shape.has_kv:
            load.shared = self._index.tree.path_pages(match.node)[: cached // self.shape.page_tokens]
            self._store.hold_in_row(load.shared)
        return load

    def _look(self, load: _Load, num_tokens: int, reserve: int) -> None:
        """See what became of a fetch, and send on what it brought as soon as there is memory for it."""
        late = self._clock() > load.deadline
        found = self._connector.poll(load.ticket)
        if found is None:
            if late:
                self._fail(load, "timeout")
        elif isinstance(found, str):
            self._fail(load, found)
        elif self._make_room(load, found, num_tokens, reserve):
            self._send(load, found)
        elif late or self._could_run(load, num_tokens, reserve):
            self._fail(load, "no_room")

    def _make_room(self, load: _Load, found: Fetched, num_tokens: int, reserve: int) -> bool:
        """Take runs for a prefix; False, with nothing taken, when its sequence could then not be admitted."""
        run = self._store.run
        runs = -(-found.kv.size // run) + 1
        rest = self.shape.pages_for(num_tokens) - found.end // self.shape.page_tokens if self.shape.has_kv else 0
        if self._store.room < (runs + 1) * run + rest + reserve:
            return False
        taken: list[int] = []
        for _ in range(runs):
            made = self._index.make_room(0, slot=True)
            slot = self._store.take_slot(row=True)
            assert made and slot is not None
            taken.append(slot)
        load.state_run, load.kv_runs = taken[0], taken[1:]
        load.num_kv = found.kv.size
        return True

    def _send(self, load: _Load, found: Fetched) -> None:
        load.end, load.epoch, load.stage = found.end, next(self._epochs), _Stage.MOVING
        self._moving[load.epoch] = load
        runs = [self._pages_of(run) for run in load.kv_runs]
        kv = np.concatenate([np.zeros(0, np.int64), *runs])[: load.num_kv]
        device = np.concatenate((kv, self._pages_of(load.state_run)))
        self._new_loads.append(PageTransfer(load.epoch, device, np.concatenate((found.kv, found.state))))

    def _arrived(self, load: _Load, *, ok: bool) -> None:
        """Make a prefix known that is in its pages now, or give them back."""
        if not ok or load.void:
            self._store.free_slot(load.state_run, row=True)
            for run in load.kv_runs:
                self._store.free_slot(run, row=True)
            self._fail(load, "transfer")
            return
        pages = [self._store.open_slot(run) for run in load.kv_runs]
        held = np.concatenate([np.zeros(0, np.int64), *pages])
        whole = np.concatenate((load.shared, held[: load.num_kv]))
        if not self._index.adopt(load.keys, load.token_ids[: load.end], whole, load.state_run, Kind.AWAITED):
            self._store.free_slot(load.state_run, row=True)
        self._store.drop_from_row(held)
        self.stats.loads += 1
        self.stats.hits += load.end - load.cached
        self._end(load)

    def _fail(self, load: _Load, reason: str) -> None:
        self._give_up(load, reason)
        self._end(load)

    def _give_up(self, load: _Load, reason: str) -> None:
        """Count why a prefix does not come; no reason is needed where there turned out to be none."""
        load.stage = _Stage.OVER
        if reason:
            self.stats.failures[reason] += 1

    def _end(self, load: _Load) -> None:
        """Let go of what is held for a load that is over, one way or the other."""
        load.stage = _Stage.OVER
        self._connector.release(load.ticket)
        self._store.drop_from_row(load.shared)
        load.shared = load.shared[:0]

    def _could_run(self, load: _Load, num_tokens: int, reserve: int) -> bool:
        """Whether the sequence would be admitted if it did not wait, or nobody will give back memory for it."""
        fresh = self.shape.pages_for(num_tokens) - load.shared.size
        return self._store.room >= fresh + self._store.run + reserve or not (reserve or self._moving)

    def _pages_of(self, run: int) -> np.ndarray:
        return np.arange(run * self._store.run, (run + 1) * self._store.run, dtype=np.int64)
