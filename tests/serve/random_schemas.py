"""JSON schemas made at random out of the keywords that constrained output keeps to."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b", "ab", 'k"&', "é", "a/b", "x~y", "type"]
DEFINITIONS = {
    "node": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    },
    "leaf": {"enum": ["l", 3]},
}
VALUES = [1, 2.5, "x", 'y"<|sep|>', None, True, [1, "a"], {"q": []}, "", 1e22]
PATTERNS = ["^a+$", "^[a-z]{2,4}$", "x|y", r"^\d{3}-\w+$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "uri"]


def random_schema(dice: random.Random) -> dict[str, Any]:
    """An object's schema, with definitions that some of its parts refer to."""
    return {**_object(dice, 0, dice.sample(NAMES, dice.randrange(8))), "$defs": DEFINITIONS}


def _any(dice: random.Random, depth: int) -> Any:
    if depth > 3:
        return {"type": dice.choice(["integer", "boolean", "null"])}
    return dice.choice(_MAKERS)(dice, depth + 1)


def _bounds(dice: random.Random, low: str, high: str, top: int) -> dict[str, int]:
    values = sorted((dice.randrange(top), dice.randrange(top) + 1))
    return {name: value for name, value in zip((low, high), values, strict=True) if dice.random() < 0.5}


def _object(dice: random.Random, depth: int, names: list[str] | None = None) -> dict[str, Any]:
    names = dice.sample(NAMES, dice.randrange(5)) if names is None else names
    schema: dict[str, Any] = {"type": "object"}
    if names:
        schema["properties"] = {name: _any(dice, depth) for name in names}
        schema["required"] = dice.sample(names, dice.randrange(len(names) + 1))
    extra = dice.choice([None, None, False, False, True, _any(dice, depth)])
    if extra is not None:
        schema["additionalProperties"] = extra
    if depth and not names and extra is not False and dice.random() < 0.4:
        schema["maxProperties"] = dice.randrange(4)
    return schema


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    schema = {"type": "array", **_bounds(dice, "minItems", "maxItems", 5)}
    if dice.random() < 0.7:
        schema["items"] = _any(dice, depth)
    if dice.random() < 0.3 and "maxItems" not in schema:
        schema["prefixItems"] = [_any(dice, depth) for _ in range(dice.randrange(1, 3))]
        schema["items"] = dice.choice([False, True, {"type": "null"}])
        del schema["minItems" if "minItems" in schema else "type"]
    return schema


def _string(dice: random.Random, _: int) -> dict[str, Any]:
    bounds = _bounds(dice, "minLength", "maxLength", 6)
    limits = [{"pattern": dice.choice(PATTERNS)}, {"format": dice.choice(FORMATS)}, bounds]
    return {"type": "string", **dice.choice(limits)}


def _number(dice: random.Random, _: int) -> dict[str, Any]:
    low = dice.choice(["minimum", "exclusiveMinimum"])
    if dice.random() < 0.3:
        return {"type": "integer", "multipleOf": dice.choice([1, 2, 7, 100])}
    return {"type": dice.choice(["integer", "number"]), **_bounds(dice, low, "maximum", 200)}


def _enumeration(dice: random.Random, _: int) -> dict[str, Any]:
    values = dice.sample(VALUES, dice.randrange(1, 5))
    return dice.choice([{"enum": values}, {"const": values[0]}, {"enum": [*values, "s"], "type": ["string", "number"]}])


def _union(dice: random.Random, depth: int) -> dict[str, Any]:
    parts = [_any(dice, depth) for _ in range(dice.randrange(1, 4))]
    disjoint = [{"type": "string"}, {"type": "array", "items": _any(dice, depth)}, {"type": "boolean"}]
    return dice.choice([{"anyOf": parts}, {"oneOf": disjoint}])


def _both(dice: random.Random, depth: int) -> dict[str, Any]:
    first = {"type": "object", "properties": {"p": _any(dice, depth)}, "required": ["p"]}
    return {"allOf": [first, {"type": "object", "properties": {"q": _any(dice, depth)}}]}


def _loose(dice: random.Random, _: int) -> Any:
    types = dice.sample(["string", "integer", "number", "null", "array", "object", "boolean"], dice.randrange(1, 4))
    without_type = [{"properties": {"a": {"type": "integer"}}}, {"items": {"type": "null"}}, {"minLength": 1}]
    return dice.choice([{}, True, {"description": "x"}, {"type": types}, *without_type])


def _reference(dice: random.Random, _: int) -> dict[str, Any]:
    return {"$ref": dice.choice(["#/$defs/node", "#/$defs/leaf"]), "description": "elsewhere"}


_MAKERS = (_object, _array, _string, _string, _number, _enumeration, _union, _both, _loose, _reference)
