"""Objects in a Mooncake store, which other engines of the same model share."""

from __future__ import annotations

import hashlib
import importlib
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from k3hal.engine.cache.keys import DIGEST_BYTES, PrefixNames
from k3hal.engine.tier.backing import ObjectDamagedError, ObjectLostError
from k3hal.engine.tier.interface import ObjectMeta
from k3hal.engine.tier.mooncake_config import MooncakeConfig
from k3hal.engine.tier.object_file import FIRST_READ, Header, ObjectFormat
from k3hal.errors import UnsupportedError, UsageError

_NOT_FOUND = -704
_SCRATCH_BYTES = 1 << 18
_SCRATCHES = 8
"""As many as there are threads that may ask at a time, and some."""

_TAILS = 4
"""Most prefixes that end inside one match unit and are found again."""

_NO_LIMIT = 1 << 62


class MooncakeStore:
    """`Backing` over a Mooncake client. Every object is a value; its bytes are those of a file (`object_file.py`).

    A value is found by its key alone, so what ends inside a match unit leaves a note under the name of the whole units
    before it, one of a few, with its key and end. `memory` u8 [pages, page bytes] is where objects come from
    and go to, without a copy on the way. The store itself decides what it gives up.
    """

    shared = True
    capacity = _NO_LIMIT

    def __init__(self, client: Any, form: ObjectFormat, memory: np.ndarray) -> None:
        self.form, self._client, self._memory = form, client, memory
        self._prefix = f"k3hal/{form.fingerprint}/"
        self._scratches: queue.Queue[np.ndarray] = queue.Queue()
        self._buffers = [np.zeros(_SCRATCH_BYTES, np.uint8) for _ in range(_SCRATCHES)]
        for buffer in (memory, *self._buffers):
            code = client.register_buffer(buffer.ctypes.data, buffer.nbytes)
            if code:
                raise UsageError(f"Mooncake does not take {buffer.nbytes} bytes of host memory: error {code}")
        for buffer in self._buffers:
            self._scratches.put(buffer)

    @classmethod
    def connect(cls, config: MooncakeConfig, form: ObjectFormat, memory: np.ndarray) -> MooncakeStore:
        """A store reached as `config` says. Raises `UnsupportedError` or `UsageError`."""
        try:
            module = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise UnsupportedError(
                f"the Mooncake store cannot be used: {error}",
                hint="install mooncake-transfer-engine (or -non-cuda, with libibverbs1) beside k3hal",
            ) from error
        client = module.MooncakeDistributedStore()
        code = client.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name,
            config.master_server_address,
        )
        if code:
            raise UsageError(
                f"no Mooncake store at {config.master_server_address}: error {code}",
                hint="see that mooncake_master runs there",
            )
        return cls(client, form, memory)

    @property
    def seed(self) -> bytes:
        """What names start from: the same for every engine whose objects these are."""
        return hashlib.sha256(b"k3hal" + self.form.fingerprint.encode()).digest()

    def scan(self) -> list[ObjectMeta]:
        return []

    def resolve(self, names: PrefixNames, limit: int, floor: int) -> list[ObjectMeta]:
        for key in self._candidates(names, limit, floor):
            chain = self._chain(key)
            if chain:
                return chain
        return []

    def size(self, meta: ObjectMeta) -> int:
        return self.form.size(meta)

    def write(self, meta: ObjectMeta, sums: np.ndarray, pages: Sequence[memoryview]) -> None:
        header = np.frombuffer(self.form.header(meta, sums), np.uint8)
        with self._scratch() as scratch:
            if header.size > scratch.size:
                raise OSError(f"an object of {meta.end - meta.start} tokens is too long for Mooncake")
            scratch[: header.size] = header
            places = [scratch.ctypes.data, *(_address(page) for page in pages)]
            sizes = [header.size, *(len(page) for page in pages)]
            (code,) = self._client.batch_put_from_multi_buffers([self._name(meta.key)], [places], [sizes])
        if code < 0:
            raise OSError(f"Mooncake refuses an object: error {code}")
        if meta.end % self.form.shape.unit:
            self._note(meta)

    def read(self, meta: ObjectMeta, first: int, out: Sequence[memoryview]) -> np.ndarray:
        header = self._header(meta.key)
        if header.meta != meta:
            raise ObjectDamagedError("a Mooncake object of the prefix cache is another one")
        page_bytes = self.form.shape.page_bytes
        sources = [header.data + (first + place) * page_bytes for place in range(len(out))]
        targets = [_address(page) - self._memory.ctypes.data for page in out]
        self._get(self._memory, meta.key, targets, sources, [page_bytes] * len(out))
        return header.sums[first : first + len(out)]

    def remove(self, meta: ObjectMeta) -> None:
        code = self._client.remove(self._name(meta.key), True)
        if code not in (0, _NOT_FOUND):
            raise OSError(f"Mooncake does not remove an object: error {code}")

    def close(self) -> None:
        for buffer in (self._memory, *self._buffers):
            self._client.unregister_buffer(buffer.ctypes.data)
        self._client.close()

    def _candidates(self, names: PrefixNames, limit: int, floor: int) -> Iterator[bytes]:
        """Keys of objects that are there and end where asked for, the longest prefix first."""
        unit = self.form.shape.unit
        wholes = [names.whole(units) for units in range(limit // unit, floor // unit - 1, -1)]
        there = self._exist([self._name(key) for key in wholes])
        noted = self._exist([self._note_name(key, place) for key in wholes for place in range(_TAILS)])
        for number, key in enumerate(wholes):
            end = (limit // unit - number) * unit
            notes = [place for place in range(_TAILS) if noted[number * _TAILS + place]]
            tails = [note for place in notes if (note := self._read_note(key, place)) is not None]
            for tail_end, tail in sorted(tails, reverse=True):
                if max(floor, end) < tail_end <= min(limit, end + unit - 1) and names.at(tail_end) == tail:
                    yield tail
            if there[number] and floor < end <= limit:
                yield key

    def _chain(self, key: bytes) -> list[ObjectMeta]:
        """An object and all it builds on, from the first token on; nothing when something of it is missing."""
        metas: list[ObjectMeta] = []
        while key:
            try:
                meta = self._header(key).meta
            except (ObjectLostError, ObjectDamagedError):
                return []
            if metas and meta.end != metas[-1].start:
                return []
            metas.append(meta)
            key = meta.parent
        return metas[::-1]

    def _header(self, key: bytes) -> Header:
        """Raises `ObjectLostError` or `ObjectDamagedError`."""
        size = self._client.get_size(self._name(key))
        if size == _NOT_FOUND:
            raise ObjectLostError
        if size < 0:
            raise OSError(f"Mooncake does not answer: error {size}")
        with self._scratch() as scratch:
            start = self._start(scratch, key, min(size, FIRST_READ))
            whole = self.form.header_bytes(start)
            if len(start) < whole <= min(size, scratch.size):
                start = self._start(scratch, key, whole)
            header = self.form.parse(start, size)
        if header.meta.key != key:
            raise ObjectDamagedError("a Mooncake object of the prefix cache is another one")
        return header

    def _start(self, scratch: np.ndarray, key: bytes, count: int) -> bytes:
        self._get(scratch, key, [0], [0], [count])
        return scratch[:count].tobytes()

    def _get(self, memory: np.ndarray, key: bytes, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        """Ranges of a value, from `sources` to offsets `targets` of registered memory. Raises `ObjectLostError`."""
        name = self._name(key)
        (got,) = self._client.get_into_ranges([memory.ctypes.data], [[name]], [[targets]], [[sources]], [[sizes]])
        if got != [sizes]:
            raise ObjectLostError

    def _note(self, meta: ObjectMeta) -> None:
        """Leave a note, in the first place that is free or whose object is gone. Two engines may take the same one."""
        for place in range(_TAILS):
            name = self._note_name(meta.anchor, place)
            known = self._read_note(meta.anchor, place)
            if known is not None and self._exist([self._name(known[1])]) == [True]:
                continue
            self._client.remove(name, True)
            self._client.put(name, meta.key + meta.end.to_bytes(8, "little"))
            return

    def _read_note(self, anchor: bytes, place: int) -> tuple[int, bytes] | None:
        note = self._client.get(self._note_name(anchor, place))
        if len(note) != DIGEST_BYTES + 8:
            return None
        return int.from_bytes(note[DIGEST_BYTES:], "little"), note[:DIGEST_BYTES]

    def _exist(self, names: list[str]) -> list[bool]:
        found = self._client.batch_is_exist(names) if names else []
        if any(code < 0 for code in found):
            raise OSError(f"Mooncake does not answer: error {min(found)}")
        return [code == 1 for code in found]

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _note_name(self, anchor: bytes, place: int) -> str:
        return f"{self._prefix}{anchor.hex()}/{place}"

    @contextmanager
    def _scratch(self) -> Iterator[np.ndarray]:
        """Registered memory for a header."""
        scratch = self._scratches.get()
        try:
            yield scratch
        finally:
            self._scratches.put(scratch)


def _address(page: memoryview) -> int:
    return np.frombuffer(page, np.uint8).ctypes.data
