"""Reads traces in Mooncake's format: JSON lines with lengths and the ids of the prompt's 512-token blocks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from k3hal.bench.cache.trace import Span, Trace, TraceRequest
from k3hal.errors import InputError

BLOCK_TOKENS = 512
"""Tokens that one id stands for. Equal ids are equal blocks behind equal prefixes."""

_OUTPUT_BASE = 1 << 30
"""Outputs are told apart from prompts by their ids, which stay below 2^31 as token ids do."""

_MAX_ID = (1 << 21) - 1
_MAX_TOKENS = 1 << 24


def read_trace(path: Path) -> Trace:
    """The trace of a file, sorted by arrival. No output is ever part of a later prompt in this format.

    Raises `InputError`, one line that names the file and the line, for anything but complete objects.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}", hint="--trace takes a file of JSON lines") from error
    requests: list[TraceRequest] = []
    outputs = _OUTPUT_BASE
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        request = _request(line, f"{path}:{number}", outputs)
        outputs += request.output.size
        requests.append(request)
    if not requests:
        raise InputError(f"{path}: holds no request", hint="a trace has one JSON object a line")
    requests.sort(key=lambda request: request.arrival)
    return Trace(str(path), requests, {"format": "mooncake", "block_tokens": BLOCK_TOKENS})


def _request(line: str, where: str, outputs: int) -> TraceRequest:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a plain `ValueError`
        raise InputError(f"{where}: not JSON: {error}", hint="each line is one object") from error
    if not isinstance(data, dict):
        raise InputError(f"{where}: a {type(data).__name__}", hint="each line is one object")
    arrival = _number(data, "timestamp", where)
    length = _integer(data, "input_length", where, 1)
    output = _integer(data, "output_length", where, 0)
    ids = data.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _MAX_ID for i in ids):
        raise InputError(f"{where}: hash_ids is {_short(ids)}", hint=f"a list of integers from 0 to {_MAX_ID - 1}")
    blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise InputError(
            f"{where}: {len(ids)} hash_ids for an input_length of {length}",
            hint=f"one for each {BLOCK_TOKENS} tokens begun makes {blocks}",
        )
    if len(set(ids)) != blocks:
        raise InputError(f"{where}: hash_ids repeat", hint="an id stands for a block behind one prefix")
    return TraceRequest(arrival / 1000, _spans(ids, length), Span(outputs, output))


def _spans(ids: list[int], length: int) -> tuple[Span, ...]:
    """Token `t` of block `b` is `512 b + t`; blocks that follow each other make one span, the last may be cut short."""
    spans: list[Span] = []
    first = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            size = min(index * BLOCK_TOKENS, length) - first * BLOCK_TOKENS
            spans.append(Span(ids[first] * BLOCK_TOKENS, size))
            first = index
    return tuple(spans)


def _number(data: dict[str, Any], key: str, where: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"{where}: {key} is {_short(value)}", hint="milliseconds, not negative")
    return float(value)


def _integer(data: dict[str, Any], key: str, where: str, low: int) -> int:
    value = data.get(key)
    if type(value) is not int or not low <= value <= _MAX_TOKENS:
        raise InputError(f"{where}: {key} is {_short(value)}", hint=f"an integer from {low} to {_MAX_TOKENS}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
