"""One block of device memory, seen as pages by the allocator and as layer tensors by the model."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.batch import CacheViews


class CacheArena:
    """The model's views of `memory`, u8 of whole runs on the device.

    `pages` u8 [num_pages, page_bytes] is what page copies work on, `slots` u8 [num_slots, slot_bytes] all that belongs
    to each state slot. Every page and every slot is addressable; that no
    byte serves two owners is the pool's doing. Contents matter only once written, except that the null run is zeroed.
    """

    def __init__(self, layout: CacheLayout, memory: Tensor) -> None:
        if memory.numel() % layout.run_bytes:
            raise ValueError(f"{memory.numel()} bytes are no whole number of runs of {layout.run_bytes}")
        self.layout = layout
        self.num_slots = memory.numel() // layout.run_bytes
        self.num_pages = self.num_slots * layout.pages_per_slot
        self.pages = memory.view(self.num_pages, layout.page_bytes)
        self.slots = memory.view(self.num_slots, layout.run_bytes)[:, : layout.slot_bytes]
        self.pages[: layout.pages_per_slot].zero_()
        self.views = CacheViews(
            kv=tuple(self._kv(i) for i in range(layout.kv_layers)),
            conv=tuple(self._conv(i) for i in range(layout.kda_layers)),
            state=tuple(self._state(i) for i in range(layout.kda_layers)),
        )

    @property
    def nbytes(self) -> int:
        return self.pages.numel()

    def _kv(self, index: int) -> Tensor:
        shape = (self.layout.page_tokens, self.layout.kv_width)
        offset = index * self.layout.kv_layer_bytes
        return self._view(self.layout.kv_dtype, self.num_pages, self.layout.page_bytes, offset, shape)

    def _state(self, index: int) -> Tensor:
        shape = (self.layout.heads, self.layout.head_dim, self.layout.head_dim)
        offset = index * self.layout.state_layer_bytes
        return self._view(torch.float32, self.num_slots, self.layout.run_bytes, offset, shape)

    def _conv(self, index: int) -> Tensor:
        shape = (self.layout.conv_rows, 3 * self.layout.heads * self.layout.head_dim)
        offset = self.layout.kda_layers * self.layout.state_layer_bytes + index * self.layout.conv_layer_bytes
        return self._view(self.layout.dtype, self.num_slots, self.layout.run_bytes, offset, shape)

    def _view(self, dtype: torch.dtype, count: int, stride: int, offset: int, shape: tuple[int, ...]) -> Tensor:
        """`[count, *shape]` of `dtype` whose item `i` starts at byte `i * stride + offset`."""
        size = dtype.itemsize
        inner = [1]
        for extent in reversed(shape[1:]):
            inner.insert(0, inner[0] * extent)
        flat = self.pages.view(-1).view(dtype)
        # `as_strided` counts from the storage's start, and `memory` may begin later: at a huge page, say.
        return flat.as_strided((count, *shape), (stride // size, *inner), flat.storage_offset() + offset // size)
