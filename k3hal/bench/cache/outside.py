"""The external tier of a replay: its own books over pages without contents, and simulated time for what moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.tier.backing import ObjectLostError
from k3hal.engine.tier.host import HostTier
from k3hal.engine.tier.interface import ObjectMeta, ObjectShape, TierStats, TransferDone, Transfers
from k3hal.errors import CapacityError

LINK_BYTES_PER_SECOND = 25e9
"""Between one accelerator and host memory, either way."""

DISK_BYTES_PER_SECOND = 3e9
"""Read from one disk by one rank."""


class _AtOnce:
    """`Jobs` that are done when they are given: a disk's time passes with the movement that needs what it read."""

    full = False

    def read(self, job: Callable[[], None]) -> None:
        job()

    def write(self, job: Callable[[], None]) -> None:
        job()

    def close(self) -> None:
        """Nothing waits."""


class _Disk:
    """A `Backing` that keeps names, and counts the pages read."""

    shared, dropped = False, 0

    def __init__(self, shape: ObjectShape, capacity: int) -> None:
        self.capacity, self.pages_read = capacity, 0
        self._shape = shape
        self._objects: dict[bytes, np.ndarray] = {}

    def scan(self) -> list[ObjectMeta]:
        return []

    def resolve(self, names: PrefixNames, limit: int, floor: int) -> list[ObjectMeta]:
        return []

    def size(self, meta: ObjectMeta) -> int:
        return self._shape.pages_for(meta.end) - self._shape.first_page(meta.start) + self._shape.run

    def write(self, meta: ObjectMeta, sums: np.ndarray, pages: Sequence[memoryview]) -> None:
        self._objects[meta.key] = sums

    def read(self, meta: ObjectMeta, first: int, out: Sequence[memoryview]) -> np.ndarray:
        if meta.key not in self._objects:
            raise ObjectLostError
        self.pages_read += len(out)
        return self._objects[meta.key][first : first + len(out)]

    def remove(self, meta: ObjectMeta) -> None:
        self._objects.pop(meta.key, None)

    def close(self) -> None:
        """It is memory."""


class SimulatedTier:
    """What `--prefix-host-cache-gb` and `--prefix-disk-cache-gb` are to an engine, on one rank, without bytes.

    Every page is one byte long here; `host` and `disk` bytes are those of real pages. Stores take the link's time and
    hold up nobody; writes to the disk take none. A load takes the link's time and that of the disk's pages it needs.
    """

    def __init__(
        self, geometry: CacheGeometry, host: int, disk: int, match_unit: int, clock: Callable[[], float]
    ) -> None:
        shape = ObjectShape(geometry.page_tokens, 1, geometry.pages_per_slot, match_unit, geometry.has_kv)
        self._page_bytes, self._clock = geometry.page_bytes, clock
        least = (geometry.pages_per_slot + geometry.pages_for(1)) * geometry.page_bytes
        for flag, size in (("--host-gb", host), ("--disk-gb", disk or least)):
            if size < least:
                raise CapacityError(
                    f"{flag} {size / 1e9:.4g} does not hold one state and one page",
                    hint=f"give at least {least / 1e9:.3g}",
                )
        self._disk = _Disk(shape, disk // geometry.page_bytes) if disk else None
        self.connector = HostTier(np.zeros((host // geometry.page_bytes, 1), np.uint8), shape, _AtOnce(), self._disk)
        self.bytes_in = self.bytes_out = 0
        self._moving: list[tuple[float, int]] = []
        self._free = {"in": 0.0, "out": 0.0}
        self._disk_pages = 0

    @property
    def stats(self) -> TierStats:
        return self.connector.stats

    @property
    def disk_bytes_read(self) -> int:
        return self._disk.pages_read * self._page_bytes if self._disk else 0

    def move(self, transfers: Transfers) -> None:
        """Begin a step's movements, one after the other."""
        for transfer in transfers.stores:
            self.bytes_out += self._pass("out", transfer.epoch, transfer.device.size, 0)
        read = self._disk.pages_read if self._disk else 0
        for transfer in transfers.loads:
            self.bytes_in += self._pass("in", transfer.epoch, transfer.device.size, read - self._disk_pages)
            self._disk_pages = read

    def ended(self) -> list[TransferDone]:
        """The movements that have ended since the last call."""
        now = self._clock()
        done = [TransferDone(epoch) for end, epoch in self._moving if end <= now]
        self._moving = [one for one in self._moving if one[0] > now]
        return done

    @property
    def next_end(self) -> float:
        """When the next movement ends; now, where none is under way."""
        return min((end for end, _ in self._moving), default=self._clock())

    def _pass(self, way: str, epoch: int, pages: int, from_disk: int) -> int:
        size = pages * self._page_bytes
        start = max(self._free[way], self._clock()) + from_disk * self._page_bytes / DISK_BYTES_PER_SECOND
        self._free[way] = start + size / LINK_BYTES_PER_SECOND
        self._moving.append((self._free[way], epoch))
        return size
