"""Memory on the system's huge pages, for what every step reads: with small ones, looking addresses up costs time."""

from __future__ import annotations

import math
import mmap
import threading
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 64
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def setting() -> str:
    """What the system does with the request for huge pages: `always`, `madvise` (both grant it) or `never`."""
    if not _SETTING.exists():
        return "never"
    return _SETTING.read_text().partition("[")[2].partition("]")[0]


def map_bytes(num_bytes: int) -> Tensor:
    """`num_bytes` > 0 of zeros, u8. They take no memory before they are used: gigabytes cost neither time nor space.

    From one huge page on, they begin at a huge page's start and ask for huge pages; whether the system grants them
    (`setting`) changes speed alone.
    """
    if num_bytes < HUGE_PAGE:
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=_FLAGS), dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=_FLAGS)
    if hasattr(mmap, "MADV_HUGEPAGE") and setting() != "never":
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + num_bytes]


class _Pool:
    """Cuts tensors from mappings of several huge pages, since most weights are smaller than one.

    The last mapping is kept for the next tensor; a mapping is freed when no tensor cut from it is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def cut(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size >= _CHUNK:
            return map_bytes(size)[:num_bytes]
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = map_bytes(_CHUNK), 0
            begin = self._used
            self._used += size
            return self._chunk[begin : begin + num_bytes]


_pool = _Pool()


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Like `torch.zeros`, for tensors that live long."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(*shape, dtype=dtype)
    return _pool.cut(num_bytes).view(dtype).view(*shape)
