"""Request traces: when requests arrive and how long they are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k3hal.errors import InputError, UsageError

_LONGEST = 10**9
_LINE = 100_000


class Arrival(NamedTuple):
    """One request: seconds since the trace began, prompt tokens, output tokens."""

    at: float
    prompt: int
    output: int


def read_workload(text: str) -> list[Arrival]:
    """The arrivals of `trace:FILE`, in order of time. FILE holds one JSON object a line with `timestamp` (ms),
    `input_length` and `output_length`. Raises `UsageError` for another kind of workload, `InputError` naming the line.
    """
    kind, colon, name = text.partition(":")
    if kind != "trace" or not colon or not name:
        raise UsageError(f"--workload is {text!r}", hint="it is trace:FILE")
    path = Path(name)
    arrivals = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LINE), ""), 1):
                if len(line) == _LINE:
                    raise InputError(f"{path} line {number}: longer than {_LINE} characters")
                if line.strip():
                    arrivals.append(_arrival(line, f"{path} line {number}"))
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
    if len(arrivals) < 2:
        raise InputError(f"{path}: {len(arrivals)} requests", hint="an arrival rate takes at least two")
    return sorted(arrivals)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that `fraction` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)]


def _arrival(line: str, where: str) -> Arrival:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON") from error
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected an object", hint="with timestamp, input_length and output_length")
    for key, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LONGEST * 1000:
            raise InputError(f"{where}: {key} is {value!r:.40}", hint=f"expected a number of at least {least}")
    prompt, output = int(data["input_length"]), int(data["output_length"])
    if prompt + output > _LONGEST:
        raise InputError(f"{where}: {prompt + output} tokens", hint=f"at most {_LONGEST}")
    return Arrival(data["timestamp"] / 1000, prompt, max(output, 1))
