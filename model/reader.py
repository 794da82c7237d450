"""Weights from a checked checkpoint into owned tensors, one at a time, without keeping the files' pages in memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from k3hal.dispatch.errors import CheckpointError, K3HALError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.manifest import TensorSpec
from k3hal.model.parallel import Shard
from k3hal.model.safetensors_io import StoredTensor

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "I8": torch.int8}

_BLOCK_BYTES = 4 << 20
"""Stored bytes copied between two releases of the files' pages; bounds what loading adds to resident memory."""


class _MappedFile(NamedTuple):
    """A shard in the address space: the mapping, and its bytes as a tensor that nobody writes to."""

    mapping: mmap.mmap
    content: torch.Tensor


class WeightReader:
    """Hands out every text tensor of a checkpoint exactly once.

    `dtype` is the engine's dtype: tensors that the layout stores as BF16 become it, those it stores as F32, U8 or I8
    keep their kind. `progress` is called with stored bytes as they are consumed. Use it as a context manager, and call
    `finish` when the model is built.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        dtype: torch.dtype,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.dtype = dtype
        self._progress = progress
        self._files: dict[str, _MappedFile] = {}
        self._taken: set[str] = set()
        self._unreleased = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget the files. A mapping goes when the last view of it does, so an error in flight is not masked."""
        self._files.clear()

    def resident_dtype(self, name: str) -> torch.dtype:
        """The dtype `get` gives tensor `name` when none is asked for."""
        spec = self._spec(name)
        return self.dtype if spec.dtype == "BF16" else _DTYPES[spec.dtype]

    def shape(self, name: str, shard: Shard | None = None) -> tuple[int, ...]:
        """Shape of tensor `name`, or of its part `shard`."""
        shape = self._spec(name).shape
        if shard is None:
            return shape
        length = self._span(name, shard)[1]
        return (*shape[: shard.dim], length, *shape[shard.dim + 1 :])

    def get(self, name: str, dtype: torch.dtype | None = None, *, shard: Shard | None = None) -> torch.Tensor:
        """Tensor `name` (or its part `shard`) as a contiguous tensor of its own on the reader's device."""
        wanted = self.resident_dtype(name) if dtype is None else dtype
        out = torch.empty(self.shape(name, shard), dtype=wanted, device=self.device)
        self.fill(out, name, shard=shard)
        return out

    def fill(self, out: torch.Tensor, name: str, *, shard: Shard | None = None) -> None:
        """Copy tensor `name` (or its part `shard`) into `out`, converting to its dtype and device.

        `out` may be a slice of a larger tensor; its shape must be the part's, or have as many elements when the part
        is only a reshape of it.
        """
        stored = self._take(name)
        part = self.shape(name, shard)
        if out.shape != part and out.numel() != torch.Size(part).numel():
            raise K3HALError(f"tensor {name} of shape {list(part)} cannot fill one of shape {list(out.shape)}")
        target = out if out.shape == part else out.view(part)
        self._copy(target, stored, shard)

    def finish(self) -> None:
        """Close the files. Raises `K3HALError`, a bug of the model text, when a text tensor was not consumed."""
        self.close()
        left = [name for name in self.checkpoint.specs if name not in self._taken]
        if left:
            raise K3HALError(f"{len(left)} tensors were never loaded, the first is {left[0]}")

    def _spec(self, name: str) -> TensorSpec:
        spec = self.checkpoint.specs.get(name)
        if spec is None:
            raise K3HALError(f"the model asks for tensor {name}, which its config does not promise")
        return spec

    def _take(self, name: str) -> StoredTensor:
        self._spec(name)
        if name in self._taken:
            raise K3HALError(f"tensor {name} is loaded twice")
        self._taken.add(name)
        return self.checkpoint.tensors[name]

    def _span(self, name: str, shard: Shard) -> tuple[int, int]:
        size = self._spec(name).shape[shard.dim]
        if size % shard.world or not 0 <= shard.rank < shard.world:
            raise CheckpointError(
                f"tensor {name}: dimension {shard.dim} of size {size} cannot be split for rank {shard.rank} "
                f"of {shard.world}; expected a divisor of the size"
            )
        length = size // shard.world
        return shard.rank * length, length

    def _copy(self, target: torch.Tensor, stored: StoredTensor, shard: Shard | None) -> None:
        """Copy in blocks of rows, dropping the source pages of each block once it is copied."""
        rows = stored.shape[0]
        row_bytes = stored.nbytes // rows
        step = max(1, _BLOCK_BYTES // row_bytes)
        first, last, across = 0, rows, shard
        if shard is not None and shard.dim == 0:
            first, length = self._span(stored.name, shard)
            last, across = first + length, None
        for begin in range(first, last, step):
            end = min(begin + step, last)
            block = self._block(stored, begin, end, row_bytes)
            if across is not None:
                block = block.narrow(across.dim, *self._span(stored.name, across))
            target[begin - first : end - first].copy_(block)
            self._release((end - begin) * row_bytes)
        self._report(stored.nbytes)

    def _block(self, stored: StoredTensor, begin: int, end: int, row_bytes: int) -> torch.Tensor:
        """Rows `begin..end` as a view of the file; a misaligned tensor is copied first."""
        dtype = _DTYPES[stored.dtype]
        first = stored.offset + begin * row_bytes
        last = stored.offset + end * row_bytes
        content = self._file(stored.shard).content
        if last > len(content):
            raise CheckpointError(
                f"shard {stored.shard} shrank to {len(content)} bytes since it was opened; "
                f"expected tensor {stored.name} up to byte {last}"
            )
        raw = content[first:last]
        if first % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(end - begin, *stored.shape[1:])

    def _file(self, shard: str) -> _MappedFile:
        if shard not in self._files:
            self._files[shard] = _map_file(self.checkpoint.path / shard)
        return self._files[shard]

    def _release(self, nbytes: int) -> None:
        """Give back the files' pages, and what turning tensors into a provider's layout left free, after every block.

        Whole mappings are released, not the bytes just read: the kernel maps neighbours of a page that faults, so
        pages released one tensor at a time would come back.
        """
        self._unreleased += nbytes
        if self._unreleased >= _BLOCK_BYTES:
            for file in self._files.values():
                file.mapping.madvise(mmap.MADV_DONTNEED)
            _trim()(0)
            self._unreleased = 0

    def _report(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes)


def _map_file(path: Path) -> _MappedFile:
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"cannot map shard {path}: {getattr(error, 'strerror', None) or error}") from error
    with warnings.catch_warnings():
        # torch warns that the buffer is read-only; every use here is a copy out of it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return _MappedFile(mapping, torch.frombuffer(mapping, dtype=torch.uint8))


@functools.cache
def _trim() -> Callable[[int], int]:
    """glibc keeps freed blocks of up to 32 MiB, a third of a small model; other libraries return them."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
