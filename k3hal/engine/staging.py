"""Arrays between host and device without waiting: through pinned buffers, each used again when the device is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.runtime import DeviceRuntime, Event

_ALIGNMENT = 16
"""Bytes: what kernels that load vectors want of a tensor's address."""
_LEAST = 4096

_TORCH_DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NUMPY_DTYPES = {dtype: np.dtype(name) for name, dtype in _TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrays one after the other in one buffer of `size` bytes: where each begins, its dtype and its shape."""

    places: tuple[tuple[int, np.dtype[Any], tuple[int, ...]], ...]
    size: int

    @classmethod
    def of(cls, *arrays: tuple[np.dtype[Any] | type, tuple[int, ...]]) -> Layout:
        places, at = [], 0
        for kind, shape in arrays:
            dtype = np.dtype(kind)
            places.append((at, dtype, shape))
            at += -(-dtype.itemsize * prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(places), at)

    def arrays(self, buffer: np.ndarray) -> list[np.ndarray]:
        """The arrays as views of a host buffer uint8 [at least `size`]."""
        return [
            buffer[at : at + dtype.itemsize * prod(shape)].view(dtype).reshape(shape)
            for at, dtype, shape in self.places
        ]

    def tensors(self, buffer: Tensor) -> list[Tensor]:
        """The arrays as views of a tensor uint8 [at least `size`]."""
        return [
            buffer[at : at + dtype.itemsize * prod(shape)].view(_TORCH_DTYPES[dtype.name]).view(shape)
            for at, dtype, shape in self.places
        ]


class PinnedBuffers:
    """Host buffers that come back when an event is over. There are as many as were ever under way at once."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._free: list[Tensor] = []
        self._lent: deque[tuple[Tensor, Event]] = deque()

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 buffer of at least `num_bytes` that nobody else uses."""
        while self._lent and self._lent[0][1].query():
            self._free.append(self._lent.popleft()[0])
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        return self._allocate(max(1 << max(num_bytes - 1, 0).bit_length(), _LEAST))

    def give_back(self, buffer: Tensor, after: Event | None = None) -> None:
        """The buffer may be used again: now, or when the event is over."""
        if after is None:
            self._free.append(buffer)
        else:
            self._lent.append((buffer, after))


class Fetch:
    """Values of tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor], buffers: PinnedBuffers, runtime: DeviceRuntime) -> None:
        self._layout = Layout.of(*((_NUMPY_DTYPES[t.dtype], tuple(t.shape)) for t in tensors))
        self._buffers = buffers
        self._buffer: Tensor | None = buffers.take(self._layout.size)
        for place, tensor in zip(self._layout.tensors(self._buffer), tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        self._event = runtime.current_stream().record()

    def lists(self) -> list[Any]:
        """Wait for the values: each tensor as a (nested) list. To be called once."""
        if self._buffer is None:
            raise RuntimeError("what was fetched has been taken before")
        self._event.synchronize()
        buffer, self._buffer = self._buffer, None
        lists = [array.tolist() for array in self._layout.arrays(buffer.numpy())]
        self._buffers.give_back(buffer)
        return lists


@dataclass(frozen=True, slots=True)
class Fetched:
    """As `Fetch`, of values that were there at once."""

    values: list[Any]

    def lists(self) -> list[Any]:
        return self.values


class Staging:
    """`upload` and `fetch` for the device of a runtime; without one the host is the device.

    Where the device works while the host goes on (`asynchronous`), neither waits for it.
    """

    def __init__(self, device: torch.device, runtime: DeviceRuntime | None = None) -> None:
        self.device = device
        self._runtime = runtime if runtime is not None and runtime.asynchronous else None
        self._buffers = PinnedBuffers(runtime.allocate_pinned) if runtime is not None else None

    @property
    def asynchronous(self) -> bool:
        return self._runtime is not None

    def upload(self, *arrays: np.ndarray) -> list[Tensor]:
        """The arrays on the device, by one copy. Where the host is the device they share its memory."""
        if self._runtime is None:
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        layout = Layout.of(*((array.dtype, array.shape) for array in arrays))
        moved = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        self.send(self.pack(layout, arrays), moved, layout)
        return layout.tensors(moved)

    def pack(self, layout: Layout, arrays: Sequence[np.ndarray]) -> Tensor:
        """A host buffer that holds the arrays as `layout` says, to be sent once.

        An array may have less rows and columns than its place; the rest of the place becomes zero.
        """
        buffer = self._buffers.take(layout.size) if self._buffers else torch.empty(layout.size, dtype=torch.uint8)
        for place, array in zip(layout.arrays(buffer.numpy()), arrays, strict=True):
            if place.shape != array.shape:
                place.fill(0)
            place[tuple(slice(length) for length in array.shape)] = array
        return buffer

    def send(self, packed: Tensor, target: Tensor, layout: Layout) -> None:
        """Copy what was packed to a device buffer uint8 [at least `layout.size`]."""
        target[: layout.size].copy_(packed[: layout.size], non_blocking=True)
        if self._buffers:
            self._buffers.give_back(packed, self._runtime.current_stream().record() if self._runtime else None)

    def fetch(self, *tensors: Tensor) -> Fetch | Fetched:
        """Begin to bring to the host what the tensors hold now; later changes of them are not seen."""
        if self._runtime is None or self._buffers is None:
            return Fetched([tensor.tolist() for tensor in tensors])
        return Fetch(tensors, self._buffers, self._runtime)
