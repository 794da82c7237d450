"""Small image files made by hand, and their URLs."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int, height: int, shade: int = 0) -> bytes:
    """A whole grey PNG; its one row of pixels is repeated only in the header, so that any size is small."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress(b"\0" + bytes([shade]) * min(width, 100))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0,;"


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def chat_part(url: object, kind: str = "image_url") -> dict[str, object]:
    return {"type": kind, kind: {"url": url, "detail": "low"} if kind == "image_url" else url}
