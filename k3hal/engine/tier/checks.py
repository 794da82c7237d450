"""Checksums of pages: CRC-32 each, so that parts of an object can be checked alone."""

from __future__ import annotations

import zlib

import numpy as np


def page_sums(memory: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """uint32 [N]: the checksum of each of `pages` int64 [N] of `memory` u8 [P, bytes]."""
    return np.array([zlib.crc32(memory[page].data) for page in pages.tolist()], np.uint32)
