"""Counts of a worker that vLLM's front reads: a file of numbers both map, since vLLM has no channel for them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3hal.dispatch.cache_dir import cache_dir, using_cache

_SUFFIX = ".figures"
_WORD = 8
_MOST_HEADER = 1 << 20
_NONE_OF_OURS = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What reading a file raises that no `Board` wrote."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one worker wrote: `about` is fixed when it starts, `values` are the counts now."""

    about: Mapping[str, Any]
    values: Mapping[str, float]


class Board:
    """The writer's side. Item assignment costs a store; readers see it at once, and whole.

    Goes with the process: `close` removes the file, and `sweep` those that a killed worker left behind.
    """

    def __init__(self, file: Path, names: Sequence[str], about: Mapping[str, Any]) -> None:
        """Raises `InputError` where the cache folder cannot be written."""
        self._at = {name: i for i, name in enumerate(names)}
        self._file = file
        header = json.dumps({"pid": os.getpid(), "names": list(names), "about": about}).encode()
        size = _WORD * math.ceil((len(header) + 1) / _WORD)
        with using_cache(file):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as made:
                made.write(size.to_bytes(_WORD, "little") + header.ljust(size))
                made.write(bytes(_WORD * len(names)))
            os.replace(made.name, file)
            self._values = np.memmap(file, np.float64, "r+", offset=_WORD + size, shape=(len(names),))

    def __setitem__(self, name: str, value: float) -> None:
        self._values[self._at[name]] = value

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


def figures_folder() -> Path:
    return cache_dir() / "vllm"


def figures_file(instance: str, engine: int, rank: int) -> Path:
    """The file of one worker: `instance` is vLLM's id of a server, `engine` its data-parallel rank."""
    return figures_folder() / f"{instance}-{engine}-{rank}{_SUFFIX}"


def read_instance(instance: str, engine: int) -> Iterator[Figures]:
    """Of every rank of an engine on this machine that has written some, lowest first."""
    files = figures_folder().glob(f"{instance}-{engine}-*{_SUFFIX}")
    for file in sorted(files, key=lambda file: (len(file.name), file.name)):
        found = read(file)
        if found is not None:
            yield found


def read(file: Path) -> Figures | None:
    """None for a file that is gone, or is none of ours."""
    try:
        data = file.read_bytes()
        size = int.from_bytes(data[:_WORD], "little")
        if not data or size > _MOST_HEADER:
            return None
        header = json.loads(data[_WORD : _WORD + size])
        values = np.frombuffer(data, np.float64, len(header["names"]), _WORD + size)
        return Figures(header["about"], dict(zip(header["names"], values.tolist(), strict=True)))
    except _NONE_OF_OURS:
        return None


def sweep() -> None:
    """Remove the files of workers that are no more."""
    for file in figures_folder().glob(f"*{_SUFFIX}"):
        with suppress(*_NONE_OF_OURS):
            data = file.read_bytes()
            header = json.loads(data[_WORD : _WORD + int.from_bytes(data[:_WORD], "little")])
            if not _alive(header["pid"]):
                file.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
