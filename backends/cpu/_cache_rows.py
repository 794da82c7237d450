"""Rows of a paged cache as one fp32 matrix, whatever the page stride and the stored dtype."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from k3hal.backends.cpu._scratch import Scratch

_scratch = Scratch()


@lru_cache(maxsize=1)
def _fp8_values() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class CacheRows:
    """Reads rows of sequences. `kv_cache` [P, page, E] with a dense page and any page stride."""

    def __init__(self, kv_cache: Tensor, page_table: Tensor) -> None:
        pages, self.page_tokens, self.width = kv_cache.shape
        self.table = page_table.numpy()
        if kv_cache.dtype == torch.float8_e4m3fn:
            kv_cache = kv_cache.view(torch.uint8)
        # A view that steps by the greatest common divisor of page and row stride has every row as one of its rows.
        stride = kv_cache.stride(0) if pages > 1 else self.page_tokens * self.width
        step = math.gcd(stride, self.width)
        self.page_steps, self.row_steps = stride // step, self.width // step
        steps = (pages - 1) * self.page_steps + (self.page_tokens - 1) * self.row_steps + 1
        self.flat = kv_cache.as_strided((steps, self.width), (step, 1))

    def read(self, sequences: list[int], lengths: list[int], first: int, last: int) -> Tensor:
        """Positions [first, last) of each sequence, fp32 [B, last - first, E], valid until this thread's next read.

        Positions beyond a sequence's length repeat its last row, so that nothing unwritten is ever read.
        """
        ends = np.asarray(lengths)[:, None] - 1
        positions = np.minimum(np.arange(first, last)[None], ends)
        pages, offsets = np.divmod(positions, self.page_tokens)
        table = self.table[np.asarray(sequences)[:, None], pages].astype(np.int64)
        rows = torch.from_numpy(table * self.page_steps + offsets * self.row_steps)
        found = self._take("found", rows.numel(), self.flat.dtype)
        torch.index_select(self.flat, 0, rows.view(-1), out=found)
        return self._as_float(found).view(len(sequences), last - first, self.width)

    def _as_float(self, found: Tensor) -> Tensor:
        if found.dtype == torch.float32:
            return found
        out = self._take("float", found.shape[0], torch.float32)
        if found.dtype != torch.uint8:
            return out.copy_(found)
        # The library's conversion of float8 takes 3 ns an element, the table a fifth of that.
        index = self._take("codes", found.shape[0], torch.int32).copy_(found)
        torch.index_select(_fp8_values(), 0, index.view(-1), out=out.view(-1))
        return out

    def _take(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        return _scratch.take(name, rows * self.width, dtype).view(rows, self.width)
