"""A past tool call's arguments as XTML: one typed element per key, number literals kept as written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from k3hal.errors import RequestError
from k3hal.serve.xtml import Segment, element


class _Number(str):
    """A JSON number as it was written: `1e2` must not become `100.0`."""


def render_arguments(arguments: object, param: str) -> Iterator[Segment]:
    """Elements for `function.arguments`: an object, JSON text of one, nothing, or text that is not JSON (kept raw)."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments, parse_int=_Number, parse_float=_Number, parse_constant=_not_json)
        except ValueError:
            yield from element("json", arguments, ("type", "object"))
            return
        except RecursionError:
            raise RequestError(f"{param} is nested too deep to be read", param=param) from None
    else:
        parsed = arguments
    if not isinstance(parsed, Mapping):
        raise RequestError(f"{param} must be a JSON object, got {_kind(parsed)}", param=param)
    for key, value in parsed.items():
        try:
            text = value if isinstance(value, str) else _dumps(value)
        except RecursionError:
            raise RequestError(f"{param} is nested too deep to be written", param=param) from None
        yield from element("argument", text, ("key", key), ("type", _kind(value)))


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float, _Number)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _dumps(value: Any) -> str:
    """JSON with `", "` and `": "` separators, non-ASCII as it is and number literals untouched."""
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_dumps(str(k))}: {_dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dumps, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
