"""Buffers that are used again, so that large temporaries do not fault fresh pages in on every call."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """Named buffers of one thread, each as large as its largest use."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of undefined content, valid until the same name is taken again."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            # A buffer made under inference mode could not be written outside it, and one of them makes it first.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype] = torch.empty(count, dtype=dtype)
        return buffer[:count]
