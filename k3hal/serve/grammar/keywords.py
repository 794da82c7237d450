"""The keywords of JSON schemas: which ones say what, and the checks of what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool

MAX_DEPTH = 64
MAX_SCHEMAS = 10_000
KINDS = ("string", "number", "boolean", "null", "array", "object")
"""The types a value can have in XTML; an integer is a number there."""
NOT_FOLLOWED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema",
        "$id", "id", "$comment", "$anchor", "$defs", "definitions", "format", "contentEncoding", "contentMediaType",
        "contentSchema", "nullable", "discriminator", "xml", "externalDocs",
    )
)  # fmt: skip
OF_KIND = {
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "additionalItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    ),
}  # fmt: skip
MAX_REFERENCES = 32
MAX_MULTIPLE = 1024
MAX_INTEGER = 2**53
# Parts of a pattern that look around themselves, refer back, or name classes of characters by property.
ODD_PATTERN = re.compile(r"\(\?[=!<P]|\\[1-9bBpPkuzZA]")


class SchemaError(Exception):
    """The schema is wrong or beyond what any grammar could follow; `path` is a JSON pointer."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{reason} at {path or 'its root'}")


def types_of(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types a schema names; without any, those its keywords speak of, else all. No integer stands beside number.

    Raises `SchemaError` for a type that JSON does not have.
    """
    spoken = [kind for kind, keywords in OF_KIND.items() if not schema.keys().isdisjoint(keywords)]
    given = schema.get("type", spoken or list(KINDS))
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names:
        raise SchemaError(f"{path}/type", "type must be a name or a list of names")
    for name in names:
        if name not in (*KINDS, "integer"):
            raise SchemaError(f"{path}/type", f"there is no type {name!r:.100}")
    return [n for n in dict.fromkeys(names) if n != "integer" or "number" not in names]


def by_kind(values: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One enumeration for each kind of value."""
    for kind in KINDS:
        found = [value for value in values if is_of(value, kind)]
        if found:
            yield kind, {"enum": found}


def is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return name == "number" or (name == "integer" and value == int(value))
    return name == {str: "string", list: "array", dict: "object"}.get(type(value))


def rest_of(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    """What a schema says beside `keyword`, annotations left out."""
    return {key: value for key, value in schema.items() if key != keyword and key not in _ANNOTATIONS}


def as_list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(path, "must be a list")
    return value


def as_object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(path, "must be an object")
    return value


def check_bounds(kept: dict[str, Any], keywords: tuple[str, str], path: str) -> None:
    """Bounds are whole numbers, and not the wrong way round."""
    low, high = (kept.get(keyword) for keyword in keywords)
    for keyword, value in zip(keywords, (low, high), strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31):
            raise SchemaError(f"{path}/{keyword}", "must be a whole number below 2**31")
    if low is not None and high is not None and low > high:
        raise SchemaError(f"{path}/{keywords[0]}", f"is more than {keywords[1]}")
