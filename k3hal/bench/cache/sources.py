"""Where a trace comes from: a file, or a generator and its seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from k3hal.bench.cache.agentic import agentic_trace
from k3hal.bench.cache.chat import chat_trace
from k3hal.bench.cache.mooncake import read_trace
from k3hal.bench.cache.trace import Trace
from k3hal.errors import UsageError

_GENERATORS: dict[str, Callable[[int], Trace]] = {"agentic": agentic_trace, "chat": chat_trace}


def load_trace(source: str) -> Trace:
    """The trace of `FILE`, `agentic:SEED` or `chat:SEED`. Raises `UsageError` and `InputError`."""
    name, colon, seed = source.partition(":")
    if colon and name in _GENERATORS:
        if not (seed.isascii() and seed.isdecimal()):
            raise UsageError(f"--trace is {source!r}", hint=f"a seed is a whole number: {name}:0")
        return _GENERATORS[name](int(seed))
    if source in _GENERATORS:
        raise UsageError(f"--trace is {source!r}", hint=f"a generator takes a seed: {source}:0")
    return read_trace(Path(source))
