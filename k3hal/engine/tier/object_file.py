"""An object as bytes: a checked header, then its pages.

8 bytes  "K3HALOBJ"
3 x u32  little-endian: format version, bytes of the JSON, CRC-32 of the JSON
JSON     fingerprint, key, parent, anchor (hex), start, end (tokens), pages, page_bytes, sums (hex of u32 CRC-32s)
zeros    up to a multiple of 4096
pages    `pages` times `page_bytes`: KV, then state
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3hal.engine.cache.keys import DIGEST_BYTES
from k3hal.engine.tier.backing import ObjectDamagedError
from k3hal.engine.tier.interface import ObjectMeta, ObjectShape

MAGIC = b"K3HALOBJ"
VERSION = 1
_PREFIX = struct.Struct("<8sIII")
_ALIGNMENT = 4096
FIRST_READ = 1 << 16
"""Bytes that hold most headers whole."""

MAX_HEADER_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says; the pages begin at byte `data`."""

    meta: ObjectMeta
    sums: np.ndarray
    data: int


class ObjectFormat:
    """Objects of one `shape`, computed by what `fingerprint` stands for. No other object is read."""

    def __init__(self, shape: ObjectShape, fingerprint: str) -> None:
        self.shape, self.fingerprint = shape, fingerprint

    def pages(self, meta: ObjectMeta) -> int:
        kv = self.shape.pages_for(meta.end) - self.shape.first_page(meta.start)
        return kv + self.shape.run

    def size(self, meta: ObjectMeta) -> int:
        """Bytes of an object with its header."""
        pages = self.pages(meta)
        return len(self.header(meta, np.zeros(pages, np.uint32))) + pages * self.shape.page_bytes

    def header(self, meta: ObjectMeta, sums: np.ndarray) -> bytes:
        """All that comes before the pages."""
        names = {name: getattr(meta, name).hex() for name in ("key", "parent", "anchor")}
        fields = {
            "fingerprint": self.fingerprint,
            **names,
            "start": meta.start,
            "end": meta.end,
            "pages": self.pages(meta),
            "page_bytes": self.shape.page_bytes,
            "sums": sums.astype("<u4").tobytes().hex(),
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        whole = _PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text
        return whole + bytes(-len(whole) % _ALIGNMENT)

    def header_bytes(self, start: bytes) -> int:
        """Bytes of an object before its pages, from its first ones. Raises `ObjectDamagedError`."""
        if len(start) < _PREFIX.size:
            raise ObjectDamagedError(f"it ends after {len(start)} bytes")
        magic, version, length, _ = _PREFIX.unpack_from(start)
        if magic != MAGIC:
            raise ObjectDamagedError("it does not begin like an object of the prefix cache")
        if version != VERSION:
            raise ObjectDamagedError(f"its format is {version}, this program reads {VERSION}")
        if length > MAX_HEADER_BYTES:
            raise ObjectDamagedError(f"its header claims {length} bytes")
        whole = _PREFIX.size + length
        return whole + -whole % _ALIGNMENT

    def parse(self, start: bytes, size: int) -> Header:
        """The header of an object of `size` bytes whose first ones are `start`. Raises `ObjectDamagedError`."""
        data = self.header_bytes(start)
        if len(start) < data:
            raise ObjectDamagedError(f"it ends after {len(start)} bytes, in its header")
        _, _, length, crc = _PREFIX.unpack_from(start)
        text = start[_PREFIX.size : _PREFIX.size + length]
        if zlib.crc32(text) != crc:
            raise ObjectDamagedError("its header does not match its checksum")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ObjectDamagedError(f"its header is not JSON: {error}") from error
        meta, sums = self._read(fields)
        expected = data + self.pages(meta) * self.shape.page_bytes
        if size != expected:
            raise ObjectDamagedError(f"it has {size} bytes instead of {expected}")
        return Header(meta, sums, data)

    def _read(self, fields: Any) -> tuple[ObjectMeta, np.ndarray]:
        """The fields of a header, every one of them checked: whoever wrote it may have had other ideas."""
        if not isinstance(fields, dict):
            raise ObjectDamagedError("its header is no JSON object")
        if fields.get("fingerprint") != self.fingerprint:
            raise ObjectDamagedError("it was computed by another model, version or provider")
        start, end = (_integer(fields, name) for name in ("start", "end"))
        if start >= end:
            raise ObjectDamagedError(f"it holds tokens {start} to {end}")
        key, parent, anchor = (_hex(fields, name) for name in ("key", "parent", "anchor"))
        if len(key) != DIGEST_BYTES or len(anchor) != DIGEST_BYTES or len(parent) != (DIGEST_BYTES if start else 0):
            raise ObjectDamagedError("its names have wrong lengths")
        meta = ObjectMeta(key, parent, anchor, start, end)
        sums = np.frombuffer(_hex(fields, "sums", 4), "<u4").astype(np.uint32)
        shape = (_integer(fields, "pages"), _integer(fields, "page_bytes"), sums.size)
        if shape != (self.pages(meta), self.shape.page_bytes, self.pages(meta)):
            raise ObjectDamagedError(f"it has {shape[0]} pages of {shape[1]} bytes with {shape[2]} checksums")
        return meta, sums


def _integer(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ObjectDamagedError(f"its {name} is {value!r:.50}")
    return value


def _hex(fields: dict[str, Any], name: str, multiple: int = 1) -> bytes:
    value = fields.get(name)
    try:
        if isinstance(value, str) and len(value) % (2 * multiple) == 0:
            return bytes.fromhex(value)
    except ValueError:
        pass
    raise ObjectDamagedError(f"its {name} is {value!r:.50}")
