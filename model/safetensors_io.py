"""Reading and writing the safetensors container: an 8-byte length, a JSON header, then raw little-endian data."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from k3hal.dispatch.errors import CheckpointError
from k3hal.model.manifest import DTYPE_BYTES, TensorSpec

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class StoredTensor(NamedTuple):
    """Where one tensor lies: `offset` counts from the start of the file `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one shard in file order. Reads the header only.

    Raises `CheckpointError` unless the header is sane and the tensors tile the rest of the file exactly.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw, start = _header_bytes(file, path, size)
    except OSError as error:
        raise CheckpointError(f"cannot read shard {path.name}: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"shard {path.name}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"shard {path.name}: the header is a JSON {type(header).__name__}; expected an object")
    header.pop("__metadata__", None)
    tensors = [_stored(name, entry, path.name, start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_tiling(tensors, path.name, start, size)
    return tensors


def _header_bytes(file: BinaryIO, path: Path, size: int) -> tuple[bytes, int]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"shard {path.name} is {size} bytes; expected at least the 8 of a header length")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"shard {path.name}: the header claims {length} bytes; expected at most {MAX_HEADER_BYTES}"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"shard {path.name} is truncated: {size} bytes, but its header alone ends at byte {8 + length}"
        )
    return file.read(length), 8 + length


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} appears twice")
    return result


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _stored(name: str, entry: object, shard: str, start: int) -> StoredTensor:
    where = f"shard {shard}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is described by {entry!r:.60}; expected an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise CheckpointError(f"{where} has shape {shape!r:.60}; expected a list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_size, span)) or span[0] > span[1]:
        raise CheckpointError(f"{where} has data_offsets {span!r:.60}; expected [begin, end]")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where} has dtype {dtype!r:.60}; expected one of {', '.join(DTYPE_BYTES)}")
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if span[1] - span[0] != nbytes:
        raise CheckpointError(f"{where} spans {span[1] - span[0]} bytes; expected {nbytes} for {dtype} {shape}")
    return StoredTensor(name, dtype, tuple(shape), shard, start + span[0], nbytes)


def _check_tiling(tensors: list[StoredTensor], shard: str, start: int, size: int) -> None:
    """Tensors must follow each other without overlap or gap and end where the file ends."""
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            raise CheckpointError(
                f"shard {shard}: tensor {tensor.name} {kind}: it begins at byte {tensor.offset}; expected {position}"
            )
        position += tensor.nbytes
    if position != size:
        kind = "is truncated" if size < position else "has trailing bytes"
        raise CheckpointError(f"shard {shard} {kind}: {size} bytes; expected {position} by its header")


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Specs in the order a shard stores them: wide elements first, so that every tensor is naturally aligned."""
    return sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def write_shard(path: Path, specs: list[TensorSpec], data: Callable[[TensorSpec], memoryview | bytes]) -> None:
    """Write `specs` in the given order, asking `data` for one tensor's bytes at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        span = [position, position + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": span}
        position += spec.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for spec in specs:
            file.write(data(spec))
