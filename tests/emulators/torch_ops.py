"""Emulators of vendors' operators, registered with torch under the schemas that are recorded: torch itself checks what
an adapter calls them with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from k3hal.dispatch.contracts import Record
from k3hal.dispatch.library import OPS, Function, loaded

Emulator = tuple[Callable[..., Any], str]
"""What an operator does, in plain torch, and what its schema says that it returns."""


def schema_of(record: Record, returns: str) -> str:
    """The schema as torch reads it."""
    kinds = [p.kind is p.kind.KEYWORD_ONLY for p in record.parameters]
    words = [f"{p.type} {p.name}" + ("" if p.default is None else f"={p.default}") for p in record.parameters]
    if any(kinds):
        words.insert(kinds.index(True), "*")
    return f"{record.name}({', '.join(words)}) -> {returns}"


@contextmanager
def registered(emulators: Mapping[Function, Emulator]) -> Iterator[list[str]]:
    """The operators exist for the CPU, and the modules that would register them can be imported. Gives the names of
    those that are called, as they come."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        libraries = install(emulators, called, patch)
        try:
            yield called
        finally:
            for library in libraries:
                library._destroy()
            loaded.cache_clear()


def install(
    emulators: Mapping[Function, Emulator], called: list[str], patch: pytest.MonkeyPatch
) -> list[torch.library.Library]:
    """As `registered`, for as long as what this gives lives and `patch` is not undone."""
    libraries = []
    for function, emulator in emulators.items():
        if function.load:
            for part in (function.load.partition(".")[0], function.load):
                if part not in sys.modules:
                    patch.setitem(sys.modules, part, ModuleType(part))
        libraries.append(_registered(function, emulator, called))
    loaded.cache_clear()
    return libraries


def _registered(function: Function, emulator: Emulator, called: list[str]) -> torch.library.Library:
    record, (fn, returns) = function.records[-1], emulator

    def call(*args: Any, **named: Any) -> Any:
        called.append(record.name)
        given = dict(zip((p.name for p in record.parameters), args, strict=False))
        return fn(**given, **named)

    library = torch.library.Library(function.module.removeprefix(OPS), "FRAGMENT")
    library.define(schema_of(record, returns))
    library.impl(record.name, call, "CPU")
    return library
