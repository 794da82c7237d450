"""A full read of a checkpoint: everything `Checkpoint.open` checks, and the values and checksums themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3hal.dispatch.errors import InputError
from k3hal.model.checkpoint import Checkpoint, inspect, shape_problems
from k3hal.model.config_fields import read_json_object
from k3hal.model.layout import CHECKSUMS, INDEX, SLIM_INDEX
from k3hal.model.manifest import vision_tensors
from k3hal.model.modelslim import OFFSET
from k3hal.model.safetensors_io import StoredTensor

_BLOCK = 16 << 20
_NAN_SCALE = 255
"""The one E8M0 code that is not a power of two."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Every problem found, one line each, and how much was looked at. `checksums` counts verified files."""

    problems: tuple[str, ...]
    tensors: int
    total_size: int
    checksums: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | Path, progress: Callable[[int], None] | None = None) -> Verification:
    """Check sizes, index, shapes, dtypes, finite values and scales, and checksums where a list of them is present.

    `progress` is called with stored bytes as their values are checked. Raises as `inspect` does when there is nothing
    to verify.
    """
    checkpoint, problems = inspect(path)
    problems += _vision_problems(checkpoint)
    problems += _total_size_problems(checkpoint)
    for tensor in checkpoint.tensors.values():
        problem = _value_problem(checkpoint, tensor)
        if problem is not None:
            problems.append(problem)
        if progress is not None:
            progress(tensor.nbytes)
    listed, checksum_problems = _checksum_problems(checkpoint.path)
    problems += checksum_problems
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return Verification(tuple(problems), len(checkpoint.tensors), total, listed)


def shard_bytes(path: str | Path) -> int:
    """About how many bytes `verify` will read: the size of the directory's shards."""
    return sum(shard.stat().st_size for shard in Path(path).glob("*.safetensors"))


def _vision_problems(checkpoint: Checkpoint) -> list[str]:
    problems = []
    for spec in vision_tensors(checkpoint.config):
        stored = checkpoint.tensors.get(spec.name)
        if stored is None:
            problems.append(f"tensor {spec.name} is missing; expected {spec.dtype} {list(spec.shape)}")
        else:
            problems += shape_problems(checkpoint.config, spec, stored)
    return problems


def _total_size_problems(checkpoint: Checkpoint) -> list[str]:
    index = INDEX if checkpoint.slim is None else SLIM_INDEX
    if not (checkpoint.path / index).is_file():
        return []
    metadata: Any = read_json_object(checkpoint.path / index, limit=1 << 30).get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    if declared is None or declared == total:
        return []
    return [f"{index} declares total_size {declared!r:.40}; the shards hold {total}"]


def _value_problem(checkpoint: Checkpoint, tensor: StoredTensor) -> str | None:
    """A description of the first value of `tensor` that may not be, if it has one: not finite, or an offset."""
    zeros = checkpoint.slim is not None and tensor.name.endswith(OFFSET)
    with (checkpoint.path / tensor.shard).open("rb") as file:
        file.seek(tensor.offset)
        done = 0
        while done < tensor.nbytes:
            raw = file.read(min(_BLOCK, tensor.nbytes - done))
            if not raw:
                return f"shard {tensor.shard} ended inside tensor {tensor.name}"
            bad = _first_bad(raw, tensor) or (_first_offset(raw) if zeros else None)
            if bad is not None:
                index, what = bad
                element, wanted = done // _width(tensor) + index, "zeros" if zeros else "finite values"
                return f"tensor {tensor.name} in {tensor.shard}: element {element} is {what}; expected {wanted}"
            done += len(raw)
    return None


def _first_offset(raw: bytes) -> tuple[int, str] | None:
    """Flat index and value of the first F32 that is not zero."""
    values = np.frombuffer(raw, "<f4")
    index = int((values != 0).argmax())
    return (index, f"{values[index]:g}") if values[index] else None


def _width(tensor: StoredTensor) -> int:
    return {"F32": 4, "BF16": 2, "F16": 2}.get(tensor.dtype, 1)


def _first_bad(raw: bytes, tensor: StoredTensor) -> tuple[int, str] | None:
    """Flat index and kind of the first value that is not finite; integer tensors other than scales have none."""
    if tensor.dtype == "U8" and tensor.name.endswith(".weight_scale"):
        bad, what = np.frombuffer(raw, np.uint8) == _NAN_SCALE, "the E8M0 code 255, NaN"
    elif tensor.dtype == "BF16":
        bad, what = (np.frombuffer(raw, "<u2") & 0x7F80) == 0x7F80, "infinite or NaN"
    elif tensor.dtype in ("F32", "F16"):
        bad, what = ~np.isfinite(np.frombuffer(raw, "<f4" if tensor.dtype == "F32" else "<f2")), "infinite or NaN"
    else:
        return None
    return (int(bad.argmax()), what) if bad.any() else None


def _checksum_problems(folder: Path) -> tuple[int, list[str]]:
    """How many files the list in `checksums.sha256` names, and those that differ from it."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return 0, []
    problems = []
    lines = _lines(path)
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or set(name) & {"/", "\\"} or name in (".", ".."):
            problems.append(f"{CHECKSUMS} line {number} is {line[:60]!r}; expected '<sha256>  <file name>'")
        elif not (folder / name).is_file():
            problems.append(f"{name} is missing; {CHECKSUMS} lists it")
        else:
            with (folder / name).open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != digest.lower():
                problems.append(f"{name} has sha256 {actual}; expected {digest} by {CHECKSUMS}")
    return len(lines), problems


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
