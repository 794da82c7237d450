"""Objects whose other properties the compiler would get wrong, closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_NAMES, _OF_LISTS, _OF_ONE = ("properties", "$defs"), ("anyOf", "prefixItems"), ("items", "additionalProperties")


def closed_where_needed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as `SchemaReader` gives it, in which no object has further properties beside names that need an escape
    in JSON or are not ASCII.

    xgrammar keeps the names of further properties apart from the declared ones by the bytes of these: it would let
    `{"k":1,"k"&":2}` pass beside a property `k"&`, and a second `é`, of any value, beside a property `é`.
    """
    walked: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_NAMES:
            walked[key] = {name: closed_where_needed(part) for name, part in value.items()}
        elif key in _OF_LISTS:
            walked[key] = [closed_where_needed(part) for part in value]
        else:
            walked[key] = closed_where_needed(value) if key in _OF_ONE and isinstance(value, Mapping) else value
    if any(map(_is_odd, walked.get("properties", ()))):
        walked["additionalProperties"] = False
    return walked


def _is_odd(name: str) -> bool:
    return not name.isascii() or any(char in '"\\' or not char.isprintable() for char in name)
