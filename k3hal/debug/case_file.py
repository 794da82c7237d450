"""The `.k3case` file: one uncompressed zip of `case.json` and `tensors.safetensors`.

`case.json` holds everything about a case but the values of its tensors: of each argument either a plain value (`value`,
or `torch_dtype`) or its dtype, shape, strides, and where it begins in which block of memory, so that arguments that
share memory do so again. `tensors.safetensors` holds the values, contiguous: `before/ARG`, and of a recorded call
`recorded/OUTPUT`. Bytes of a block that no argument covers are not stored and come back as 0xFF.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from k3hal import __version__
from k3hal.debug.case import Case
from k3hal.debug.case_reader import read_case
from k3hal.debug.memory import ALIGNMENT, byte_span
from k3hal.errors import InputError

SCHEMA = "k3hal.case/1"
_ENTRIES = ("case.json", "tensors.safetensors")


def save_case(case: Case, path: str | Path) -> Path:
    """Write the case. Raises `InputError` when the file cannot be written."""
    document, tensors = describe_case(case)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_ENTRIES[0], json.dumps(document, indent=1) + "\n")
            archive.writestr(_ENTRIES[1], safetensors.torch.save(tensors))
    except OSError as error:
        raise InputError(f"{path}: the case cannot be written: {error.strerror}") from error
    return path


def load_case(path: str | Path) -> Case:
    """Read a case. Raises `InputError`, one line naming the file and what is wrong with it; executes nothing in it."""
    where = str(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(info.filename for info in archive.infolist())
            if names != sorted(_ENTRIES):
                raise InputError(f"{where}: holds {', '.join(names) or 'nothing'}", hint=f"a case holds {_ENTRIES}")
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise InputError(f"{where}: the zip is compressed", hint="a case is stored uncompressed")
            document, blob = (archive.read(name) for name in _ENTRIES)
    except OSError as error:
        raise InputError(f"{where}: the case cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InputError(f"{where}: not a case file: {error}") from error
    try:
        values = safetensors.torch.load(blob)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{where}: tensors.safetensors cannot be read: {error}") from error
    try:
        data = json.loads(document.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: case.json is not JSON: {error}") from error
    return read_case(where, data, values)


def describe_case(case: Case) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`case.json` and the tensors of a case."""
    arguments, tensors, blocks = {}, {}, _Blocks(case)
    for name, value in case.args.items():
        if isinstance(value, Tensor):
            arguments[name] = blocks.entry(name, value)
            tensors[f"before/{name}"] = compact_values(value)
        else:
            arguments[name] = _plain(case, name, value)
    tensors |= {f"recorded/{name}": value.contiguous().clone() for name, value in case.recorded.items()}
    document = {
        "schema": SCHEMA,
        "op": case.op,
        "name": case.name,
        "dtype": case.dtype,
        "phase": case.phase,
        "dims": dict(case.dims),
        "seed": case.seed,
        "tags": sorted(case.tags),
        "arguments": arguments,
        "blocks": blocks.sizes,
        "recorded": sorted(case.recorded),
        "origin": dict(case.origin),
        "versions": {"k3hal": __version__, "torch": torch.__version__},
    }
    return document, tensors


def _plain(case: Case, name: str, value: Any) -> dict[str, Any]:
    """The entry of an argument that is no tensor. A process group, of a collective on several ranks, has none."""
    if isinstance(value, torch.dtype):
        return {"torch_dtype": str(value).removeprefix("torch.")}
    if not isinstance(value, int | float | str | bool | None):
        raise InputError(f"{case.id}: argument {name} is a {type(value).__name__}, which no file can hold")
    return {"value": value}


class _Blocks:
    """Numbers the blocks of memory a case's arguments lie in; each is as long as its arguments' bytes reach."""

    def __init__(self, case: Case) -> None:
        self._spans: dict[int, tuple[int, int]] = {}
        for value in case.args.values():
            if isinstance(value, Tensor) and value.numel():
                first, last = byte_span(value)
                low, high = self._spans.get(value.untyped_storage().data_ptr(), (first, last))
                self._spans[value.untyped_storage().data_ptr()] = (min(low, first), max(high, last))
        self._numbers = {pointer: number for number, pointer in enumerate(self._spans)}

    @property
    def sizes(self) -> list[int]:
        """Bytes of each block. Beginnings are kept at the alignment that they had."""
        return [high - low + (pointer + low) % ALIGNMENT for pointer, (low, high) in self._spans.items()]

    def entry(self, name: str, value: Tensor) -> dict[str, Any]:
        out = {
            "tensor": f"before/{name}",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "strides": list(value.stride()),
        }
        if value.numel():
            pointer = value.untyped_storage().data_ptr()
            low = self._spans[pointer][0]
            out |= {"block": self._numbers[pointer], "offset": byte_span(value)[0] - low + (pointer + low) % ALIGNMENT}
        return out


def compact_values(value: Tensor) -> Tensor:
    """Contiguous values of a tensor; an axis repeated by stride 0 is stored once."""
    for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(axis, 0, 1)
    return value.detach().to("cpu").contiguous().clone(memory_format=torch.contiguous_format)
