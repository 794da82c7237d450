"""An external tier for tests: nothing in it happens by itself, and all of it can go wrong."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import runtime_for
from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.tier.backing import ObjectLostError
from k3hal.engine.tier.host import HostTier
from k3hal.engine.tier.interface import ObjectMeta, ObjectShape, PageTransfer, TierStats, TransferDone
from k3hal.engine.tier.mover import Mover, PageMover


@dataclass
class Chances:
    """How likely each fault is, each time it could happen."""

    slow_job: float = 0.0
    lost_job: float = 0.0
    slow_move: float = 0.0
    failed_move: float = 0.0
    repeated_end: float = 0.0
    foreign_end: float = 0.0
    damaged: float = 0.0
    lost_object: float = 0.0
    read_error: float = 0.0
    write_error: float = 0.0


QUIET = Chances()


class ManualJobs:
    """`Jobs` that run when `pump` is called, reads in any order; the slow ones later, the lost ones never."""

    def __init__(self, rng: random.Random, chances: Chances = QUIET, most_writes: int = 8) -> None:
        self._rng, self._chances, self._most_writes = rng, chances, most_writes
        self._reads: list[Callable[[], None]] = []
        self._writes: list[Callable[[], None]] = []

    @property
    def full(self) -> bool:
        return len(self._writes) >= self._most_writes

    def read(self, job: Callable[[], None]) -> None:
        if self._rng.random() >= self._chances.lost_job:
            self._reads.insert(self._rng.randint(0, len(self._reads)), job)

    def write(self, job: Callable[[], None]) -> None:
        self._writes.append(job)

    def pump(self) -> None:
        for jobs in (self._reads, self._writes):
            while jobs and self._rng.random() >= self._chances.slow_job:
                jobs.pop(0)()

    def close(self) -> None:
        while self._writes:
            self._writes.pop(0)()


class FaultyMover:
    """A `Mover` over another whose movements end late, twice, under epochs nobody knows, or not well.

    A load that ends late also writes late; until then its target holds something else.
    """

    def __init__(self, inner: Mover, rng: random.Random, chances: Chances = QUIET) -> None:
        self._inner, self._rng, self._chances = inner, rng, chances
        self._moving: list[PageTransfer] = []
        self._ended: list[TransferDone] = []
        self._past: list[int] = [0]

    def store(self, transfers: Sequence[PageTransfer]) -> None:
        self._inner.store(transfers)
        self._ended += [TransferDone(t.epoch, ok=not self._hits(self._chances.failed_move)) for t in transfers]

    def load(self, transfers: Sequence[PageTransfer]) -> None:
        self._moving += transfers

    def finished(self) -> tuple[TransferDone, ...]:
        self._arrive([t for t in self._moving if not self._hits(self._chances.slow_move)])
        told = [done for done in self._ended if not self._hits(self._chances.slow_move)]
        self._ended = [done for done in self._ended if done not in told]
        self._rng.shuffle(told)
        self._past += [done.epoch for done in told]
        if self._hits(self._chances.repeated_end):
            told.append(TransferDone(self._rng.choice(self._past)))
        if self._hits(self._chances.foreign_end):
            told.append(TransferDone(10**9))
        return tuple(told)

    def drain(self) -> None:
        self._arrive(list(self._moving))

    def _arrive(self, transfers: list[PageTransfer]) -> None:
        for transfer in transfers:
            ok = not self._hits(self._chances.failed_move)
            if ok:
                self._inner.load([transfer])
            self._ended.append(TransferDone(transfer.epoch, ok))
        self._inner.finished()
        arrived = {transfer.epoch for transfer in transfers}
        self._moving = [transfer for transfer in self._moving if transfer.epoch not in arrived]

    def _hits(self, chance: float) -> bool:
        return self._rng.random() < chance


@dataclass
class MemoryBacking:
    """A `Backing` in a dictionary, which a restart does not empty."""

    rng: random.Random
    capacity: int
    page_bytes: int
    pages_of: Callable[[ObjectMeta], int]
    chances: Chances = field(default_factory=Chances)
    shared: bool = False
    dropped: int = 0
    objects: dict[bytes, tuple[ObjectMeta, np.ndarray, list[bytes]]] = field(default_factory=dict)

    def scan(self) -> list[ObjectMeta]:
        return [meta for meta, _, _ in self.objects.values()]

    def resolve(self, names: PrefixNames, limit: int, floor: int) -> list[ObjectMeta]:
        raise NotImplementedError

    def size(self, meta: ObjectMeta) -> int:
        return self.pages_of(meta) * self.page_bytes

    def write(self, meta: ObjectMeta, sums: np.ndarray, pages: Sequence[memoryview]) -> None:
        chance = self.rng.random()
        if chance < self.chances.write_error:  # one in eight is none that removing something helps against
            kind = errno.EIO if chance < self.chances.write_error / 8 else errno.ENOSPC
            raise OSError(kind, os.strerror(kind))
        self.objects[meta.key] = meta, sums.copy(), [bytes(page) for page in pages]

    def read(self, meta: ObjectMeta, first: int, out: Sequence[memoryview]) -> np.ndarray:
        if self.rng.random() < self.chances.lost_object:
            self.objects.pop(meta.key, None)
        if self.rng.random() < self.chances.read_error:
            raise OSError("input/output error")
        if meta.key not in self.objects:
            raise ObjectLostError
        _, sums, pages = self.objects[meta.key]
        for place, target in enumerate(out):
            target[:] = pages[first + place]
        if out and self.rng.random() < self.chances.damaged:
            page = self.rng.choice(out)
            page[self.rng.randrange(len(page))] ^= 1 << self.rng.randrange(8)
        return sums[first : first + len(out)]

    def remove(self, meta: ObjectMeta) -> None:
        self.objects.pop(meta.key, None)

    def close(self) -> None:
        """It is memory."""


@dataclass
class TierKit:
    """An external tier of `host_pages` pages, over a backing of `backing_pages` if there are any.

    `build` makes it anew, as a restart does: host memory is lost then, the backing is not.
    """

    host_pages: int = 60
    backing_pages: int = 0
    chances: dict[str, float] = field(default_factory=dict)
    timeout: float = 20.0
    seed: int = 0
    most_writes: int = 8

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.faults = Chances(**self.chances)
        self.backing: MemoryBacking | None = None
        self.past = Counter[str]()
        self.tier: HostTier | None = None

    def build(self, geometry: CacheGeometry, device: Tensor, unit: int) -> None:
        """Tier and mover for an arena's pages u8 [P, bytes]."""
        self.past = self.totals()
        shape = ObjectShape(geometry.page_tokens, geometry.page_bytes, geometry.pages_per_slot, unit)

        def pages_of(meta: ObjectMeta) -> int:
            return shape.pages_for(meta.end) - shape.first_page(meta.start) + shape.run

        if self.backing_pages and self.backing is None:
            capacity = self.backing_pages * shape.page_bytes
            self.backing = MemoryBacking(self.rng, capacity, shape.page_bytes, pages_of, self.faults)
        host = torch.full((self.host_pages, shape.page_bytes), 255, dtype=torch.uint8)
        self.jobs = ManualJobs(self.rng, self.faults, self.most_writes)
        self.tier = HostTier(host.numpy(), shape, self.jobs, self.backing)
        real = PageMover(device, host, runtime_for(probe("cpu")))
        self.mover = FaultyMover(real, self.rng, self.faults)

    def totals(self) -> Counter[str]:
        """All that was counted, before every restart and since the last."""
        stats = self.tier.stats if self.tier else TierStats()
        now = {name: value for name, value in dataclasses.asdict(stats).items() if isinstance(value, int)}
        return self.past + Counter(now) + Counter(stats.failures)

    def audit(self) -> None:
        """Every host page is free or has one owner, and what is written down of the backing is what it has."""
        assert self.tier is not None
        shelf, fetches = self.tier._shelf, self.tier._fetches
        entries = list(shelf.catalogue.entries.values())
        held = [page for entry in entries for part in (entry.kv, entry.state) if part is not None for page in part]
        held += [page for fetch in fetches.values() for part in fetch.parts if part.own for page in part.pages]
        held += shelf._free
        assert len(set(held)) == len(held), "a host page has two owners"
        assert len(held) <= self.host_pages
        for entry in entries:
            assert entry.parent is None or entry.parent in entries, "an object without a beginning"
            assert entry.stored == (self.backing is not None and entry.meta.key in self.backing.objects) or self.lossy
        if self.backing:
            assert shelf.stats.backing_bytes == sum(self.backing.size(e.meta) for e in entries if e.stored)
            assert shelf.stats.backing_bytes <= self.backing.capacity

    @property
    def lossy(self) -> bool:
        return self.faults.lost_object > 0
