"""What the Mooncake client of this process promises, in a dictionary.

Checked against the package itself by the same tests, where that is installed.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

NOT_FOUND, INVALID, NO_SPACE, DOWN = -704, -600, -200, -900


@dataclass
class FakeServer:
    """The store that all clients share. `room` bytes; `down` makes every call fail."""

    values: dict[str, bytes] = field(default_factory=dict)
    room: int = 1 << 40
    down: bool = False

    @property
    def used(self) -> int:
        return sum(map(len, self.values.values()))


class FakeClient:
    """`mooncake.store.MooncakeDistributedStore`, as far as it is used."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._registered: dict[int, int] = {}

    def setup(self, *args: Any) -> int:
        return DOWN if self._server.down else 0

    def close(self) -> int:
        return 0

    def register_buffer(self, place: int, size: int) -> int:
        self._registered[place] = size
        return 0

    def unregister_buffer(self, place: int) -> int:
        del self._registered[place]
        return 0

    def put(self, key: str, value: bytes) -> int:
        """A key that is there keeps its value."""
        if self._server.down:
            return DOWN
        if key not in self._server.values:
            if self._server.used + len(value) > self._server.room:
                return NO_SPACE
            self._server.values[key] = value
        return 0

    def get(self, key: str) -> bytes:
        return b"" if self._server.down else self._server.values.get(key, b"")

    def get_size(self, key: str) -> int:
        if self._server.down:
            return DOWN
        return len(self._server.values[key]) if key in self._server.values else NOT_FOUND

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [DOWN if self._server.down else int(key in self._server.values) for key in keys]

    def remove(self, key: str, force: bool) -> int:
        assert force, "what was read a moment ago is leased"
        if self._server.down:
            return DOWN
        return 0 if self._server.values.pop(key, None) is not None else NOT_FOUND

    def batch_put_from_multi_buffers(
        self, keys: list[str], places: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        for place, size in zip(places[0], sizes[0], strict=True):
            self._check(place, size)
        parts = [ctypes.string_at(place, size) for place, size in zip(places[0], sizes[0], strict=True)]
        return [self.put(keys[0], b"".join(parts))]

    def get_into_ranges(
        self, places: list[int], keys: Any, targets: Any, sources: Any, sizes: Any
    ) -> list[list[list[int]]]:
        value = b"" if self._server.down else self._server.values.get(keys[0][0], b"")
        got: list[int] = []
        for target, source, size in zip(targets[0][0], sources[0][0], sizes[0][0], strict=True):
            self._check(places[0] + target, size)
            if source + size > len(value):
                got.append(INVALID)
                continue
            ctypes.memmove(places[0] + target, value[source : source + size], size)
            got.append(size)
        return [[got]]

    def _check(self, place: int, size: int) -> None:
        inside = [start <= place and place + size <= start + whole for start, whole in self._registered.items()]
        assert any(inside), "memory that is not registered"


def install(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    """Let `import mooncake.store` find clients of `server`."""
    package, module = ModuleType("mooncake"), ModuleType("mooncake.store")
    vars(module)["MooncakeDistributedStore"] = lambda: FakeClient(server)
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
