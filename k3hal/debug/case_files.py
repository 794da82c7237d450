"""Case and golden files that other processes read, in a folder that goes away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.golden import Golden, golden
from k3hal.dispatch.registry import get_operator


def load_golden(path: str) -> Golden:
    """What `CaseFiles.expected` wrote."""
    with safe_open(path, "pt") as file:
        dtypes = {name: getattr(torch, word) for name, word in (file.metadata() or {}).items()}
    return Golden(load_file(path), dtypes)


class CaseFiles:
    """Writes each file when it is first asked for, in the length of a `with` block."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="k3hal-cases-")
        self._made: dict[tuple[int, str], str] = {}
        self._cases: list[Case] = []

    def __enter__(self) -> CaseFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.cleanup()

    def case(self, case: Case) -> str:
        """The file of a case."""
        return self._path(case, "k3case", lambda path: save_case(case, path))

    def expected(self, case: Case) -> str:
        """The file of a case's golden outputs by name."""

        def write(path: Path) -> None:
            outputs = golden(get_operator(case.op), case.args)
            dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in outputs.dtypes.items()}
            save_file({name: value.contiguous().clone() for name, value in outputs.items()}, path, dtypes)

        return self._path(case, "golden", write)

    def _path(self, case: Case, kind: str, write: Callable[[Path], object]) -> str:
        key = (id(case), kind)
        if key not in self._made:
            # The case is kept, so that no other gets its id.
            self._cases.append(case)
            path = Path(self._folder.name) / f"{len(self._made)}.{kind}"
            write(path)
            self._made[key] = str(path)
        return self._made[key]
