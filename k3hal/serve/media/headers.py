"""What kind of image encoded bytes are and how large, read from the header without decoding anything."""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

Mime = Literal["image/png", "image/jpeg", "image/gif", "image/webp"]

# Start-of-frame markers of JPEG; the gaps are tables and arithmetic-coding conditions.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xDA)))
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


class Header(NamedTuple):
    """An image's type and its size in pixels. `whole` where the file goes on to its format's end mark."""

    mime: Mime
    width: int
    height: int
    whole: bool


def read_header(data: bytes) -> Header | None:
    """The header of a PNG, JPEG, GIF or WebP file; None if it is none of these, or cut short before its size."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
            whole = 0 < data.find(b"IDAT", 33) < data.rfind(_PNG_END)
            return Header("image/png", *struct.unpack_from(">II", data, 16), whole)
        if data.startswith((b"GIF87a", b"GIF89a")):
            whole = len(data) > 14 and data.rstrip(b"\0").endswith(b";")
            return Header("image/gif", *struct.unpack_from("<HH", data, 6), whole)
        if data.startswith(b"\xff\xd8"):
            return _jpeg(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _webp(data)
    except (struct.error, IndexError):
        return None
    return None


def _jpeg(data: bytes) -> Header | None:
    """Walk the segments to the first frame header: a thumbnail inside one of them is passed over."""
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            scan = data.find(b"\xff\xda", at)
            return Header("image/jpeg", width, height, 0 < scan < data.rfind(b"\xff\xd9"))
        elif marker in _JPEG_BARE:
            at += 2
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _webp(data: bytes) -> Header | None:
    """The three kinds of WebP: lossy, lossless and extended."""
    kind = data[12:16]
    whole = struct.unpack_from("<I", data, 4)[0] + 8 <= len(data)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("image/webp", width & 0x3FFF, height & 0x3FFF, whole)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = struct.unpack_from("<I", data, 21)[0]
        return Header("image/webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, whole)
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return Header("image/webp", width, height, whole) if len(data) >= 30 else None
    return None
