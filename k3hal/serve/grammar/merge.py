"""Two JSON schemas that hold at once, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LARGER = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
_SMALLER = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))


class ConflictError(Exception):
    """No plain schema says what the two say together; the message names the keyword."""


def merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the values that satisfy both. Raises `ConflictError`."""
    _check_closed(a, b)
    _check_closed(b, a)
    out = dict(a)
    for key, value in b.items():
        out[key] = _both(key, out[key], value) if key in out and out[key] != value else value
    return out


def _check_closed(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """A schema that speaks of the properties it does not name says something about those the other one names."""
    if "additionalProperties" in a and a["additionalProperties"] is not True:
        beyond = set(b.get("properties", ())) - set(a.get("properties", ()))
        if beyond:
            raise ConflictError("additionalProperties beside other properties")


def _both(key: str, a: Any, b: Any) -> Any:
    if key in _LARGER:
        return max(a, b)
    if key in _SMALLER:
        return min(a, b)
    if key == "type":
        return _common_types(a, b)
    if key == "required":
        return list(dict.fromkeys([*a, *b]))
    if key == "enum":
        return [value for value in a if value in b]
    if key in ("properties", "$defs", "definitions", "patternProperties"):
        return {**a, **{name: _schemas(a[name], value) if name in a else value for name, value in b.items()}}
    if key in ("items", "additionalProperties"):
        return _schemas(a, b)
    if key in ("anyOf", "oneOf", "allOf", "const", "pattern", "prefixItems", "multipleOf", "not", "$ref"):
        raise ConflictError(f"two different {key}")
    return b


def _schemas(a: Any, b: Any) -> Any:
    """Both of two subschemas; they are merged where they are used."""
    if a is True or a == {} or a == b:
        return b
    if b is True or b == {}:
        return a
    return {"allOf": [a, b]}


def _common_types(a: Any, b: Any) -> list[str]:
    left, right = ([value] if isinstance(value, str) else value for value in (a, b))
    return [name for name in (*left, *right) if _admits(left, name) and _admits(right, name)]


def _admits(types: list[str], name: str) -> bool:
    return name in types or (name == "integer" and "number" in types)
