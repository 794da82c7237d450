"""JSON schemas as a grammar can follow them: references kept local, combinations merged, the rest reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from k3hal.serve.grammar.merge import ConflictError, merge

Schema = Mapping[str, Any] | bool

MAX_DEPTH = 64
MAX_SCHEMAS = 10_000
KINDS = ("string", "number", "boolean", "null", "array", "object")
"""The types a value can have in XTML; an integer is a number there."""
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
"""The formats of strings that are kept to. The others are annotations, as JSON Schema has it."""

_NOT_FOLLOWED = (
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
_OF_KIND = {
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "additionalItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    ),
}  # fmt: skip
_MAX_REFERENCES = 32
_MAX_MULTIPLE = 1024
_MAX_INTEGER = 2**53
# Parts of a pattern that look around themselves, refer back, or name classes of characters by property.
_ODD_PATTERN = re.compile(r"\(\?[=!<P]|\\[1-9bBpPkuzZA]")


class SchemaError(Exception):
    """The schema is wrong or beyond what any grammar could follow; `path` is a JSON pointer."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{reason} at {path or 'its root'}")


class SchemaReader:
    """Reads one schema document.

    `unfollowed` lists the keywords met so far, with their places, that the schemas handed out leave out.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._count = 0
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}
        self.unfollowed: list[str] = []

    def alternatives(self) -> list[tuple[str, dict[str, Any]]]:
        """What values the root allows, as pairs of a kind of value and a schema of that kind. Raises `SchemaError`.

        The schemas are as the compiler follows them; `complete` makes one stand for itself.
        """
        return list(self._split(self._root, "", 0))

    def read(self) -> dict[str, Any]:
        """The root as one self-contained schema. Raises `SchemaError`."""
        return self.complete(self._child(self._root, "", 0))

    def complete(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`schema` with the definitions that it may refer to."""
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _split(self, schema: Schema, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        whole = self._resolved(schema, path, depth)
        if isinstance(whole, bool):
            return
        parts = self._spread(whole, path, depth)
        if parts is None:
            yield from self._plain(whole, path, depth)
        for part in parts or ():
            yield from self._split(part, path, depth + 1)

    def _plain(self, whole: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """The kinds of a schema without references and alternatives."""
        if "enum" in whole or "const" in whole:
            yield from _by_kind(self._values(whole, path))
            return
        for name in types_of(whole, path):
            kind = "number" if name == "integer" else name
            yield kind, self._of_kind(whole, kind, name, path, depth)

    def _child(self, schema: Schema, path: str, depth: int) -> dict[str, Any]:
        """One schema that allows the same values; one named by a reference is defined once, so that it may recur."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and not _rest(schema, "$ref"):
            return self._defined(schema["$ref"], schema, path, depth)
        if schema is True or (isinstance(schema, Mapping) and not _rest(schema, "")):
            return {}
        return self._inline(schema, path, depth)

    def _inline(self, schema: Schema, path: str, depth: int) -> dict[str, Any]:
        whole = self._resolved(schema, path, depth)
        found: list[dict[str, Any]] = []
        if not isinstance(whole, bool):
            parts = self._spread(whole, path, depth)
            if parts is None:
                found = [part for _, part in self._plain(whole, path, depth)]
            for part in parts or ():
                if part is not False:
                    found.append(self._child(part, path, depth + 1))
        if not found:
            raise SchemaError(path, "no value is allowed")
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _defined(self, reference: str, schema: Schema, path: str, depth: int) -> dict[str, Any]:
        name = self._names.get(reference)
        if name is None:
            name = self._names[reference] = f"d{len(self._names)}"
            self._definitions[name] = self._inline(schema, path, depth + 1)
        return {"$ref": f"#/$defs/{name}"}

    def _of_kind(self, schema: Mapping[str, Any], kind: str, name: str, path: str, depth: int) -> dict[str, Any]:
        """What `schema` says about values of one kind, in keywords the compiler follows."""
        kept: dict[str, Any] = {"type": name}
        for keyword in _OF_KIND.get(kind, ()):
            if keyword in schema:
                kept[keyword] = schema[keyword]
        if kind == "string":
            self._string(kept, schema, path)
        elif kind == "number":
            self._number(kept, path)
        elif kind == "array":
            self._array(kept, path, depth)
        elif kind == "object":
            self._object(kept, path, depth)
        return kept

    def _string(self, kept: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        _check_bounds(kept, ("minLength", "maxLength"), path)
        pattern = kept.get("pattern")
        if pattern is None:
            if kept.keys().isdisjoint(("minLength", "maxLength")) and schema.get("format") in FORMATS:
                kept["format"] = schema["format"]
            return
        if not isinstance(pattern, str):
            raise SchemaError(f"{path}/pattern", "a pattern must be a string")
        if _ODD_PATTERN.search(pattern):
            self.unfollowed.append(f"{path}/pattern")
            del kept["pattern"]
        else:
            self._leave_out(kept, ("minLength", "maxLength"), path)

    def _number(self, kept: dict[str, Any], path: str) -> None:
        for keyword in _OF_KIND["number"]:
            value = kept.get(keyword)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SchemaError(f"{path}/{keyword}", "must be a number")
            if value is not None and abs(value) > _MAX_INTEGER:
                self._leave_out(kept, (keyword,), path)
        multiple = kept.get("multipleOf")
        bounded = len(kept) > 2
        if multiple is not None and (
            kept["type"] != "integer" or bounded or multiple != int(multiple) or not 0 < multiple <= _MAX_MULTIPLE
        ):
            self._leave_out(kept, ("multipleOf",), path)

    def _array(self, kept: dict[str, Any], path: str, depth: int) -> None:
        _check_bounds(kept, ("minItems", "maxItems"), path)
        items = kept.pop("items", True)
        if isinstance(items, list):  # what prefixItems was called before 2020
            kept["prefixItems"], items = items, kept.get("additionalItems", True)
        kept.pop("additionalItems", None)
        prefix = _list(kept.pop("prefixItems", []), f"{path}/prefixItems")
        if prefix:
            kept["prefixItems"] = [
                self._child(part, f"{path}/prefixItems/{i}", depth + 1) for i, part in enumerate(prefix)
            ]
            kept["minItems"] = max(kept.get("minItems", 0), len(prefix))
        kept["items"] = False if items is False else self._child(items, f"{path}/items", depth + 1)

    def _object(self, kept: dict[str, Any], path: str, depth: int) -> None:
        _check_bounds(kept, ("minProperties", "maxProperties"), path)
        properties = _object(kept.get("properties", {}), f"{path}/properties")
        required = _list(kept.get("required", []), f"{path}/required")
        if not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{path}/required", "must be a list of names")
        extra = kept.pop("additionalProperties", None)
        patterns = _object(kept.pop("patternProperties", {}), f"{path}/patternProperties")
        if patterns:
            self.unfollowed.append(f"{path}/patternProperties")
        if extra is None:
            extra = not properties or bool(patterns)
        named = {name: self._property(name, schema, path, depth) for name, schema in properties.items()}
        for name in required:
            if name not in named:
                if extra is False and properties:
                    raise SchemaError(f"{path}/required", f"{name!r:.100} is required and not allowed")
                named[name] = {} if extra is True or extra is False else self._child(extra, path, depth + 1)
        kept |= {"properties": {n: s for n, s in named.items() if s is not None}, "required": required}
        if any(named[name] is None for name in required):
            raise SchemaError(f"{path}/required", "a required property may have no value")
        if named:
            self._leave_out(kept, ("minProperties", "maxProperties"), path)
        if kept.get("minProperties", 0) > 1:  # names are not kept apart, so two might be one
            self.unfollowed.append(f"{path}/minProperties")
        kept["additionalProperties"] = (
            extra if isinstance(extra, bool) else self._child(extra, f"{path}/additionalProperties", depth + 1)
        )

    def _property(self, name: str, schema: Schema, path: str, depth: int) -> dict[str, Any] | None:
        """A property's schema; None for one that must not appear."""
        return None if schema is False else self._child(schema, f"{path}/properties/{name}", depth + 1)

    def _leave_out(self, kept: dict[str, Any], keywords: Iterable[str], path: str) -> None:
        for keyword in keywords:
            if kept.pop(keyword, None) is not None:
                self.unfollowed.append(f"{path}/{keyword}")

    def _resolved(self, schema: Schema, path: str, depth: int) -> Mapping[str, Any] | Literal[False]:
        """`schema` with references followed and `allOf` merged; True becomes an empty schema."""
        self._count += 1
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"the schema is nested deeper than {MAX_DEPTH} levels, or refers to itself")
        if self._count > MAX_SCHEMAS:
            raise SchemaError(path, f"the schema has more than {MAX_SCHEMAS} parts")
        whole = self._dereferenced(schema, path)
        if whole is False:
            return False
        for i, part in enumerate(_list(whole.get("allOf", []), f"{path}/allOf")):
            piece = self._resolved(part, f"{path}/allOf/{i}", depth + 1)
            if piece is False:
                return False
            whole = self._merged({key: value for key, value in whole.items() if key != "allOf"}, piece, path)
        for keyword in _NOT_FOLLOWED:
            if whole.get(keyword, False) is not False:
                self.unfollowed.append(f"{path}/{keyword}")
        return whole

    def _dereferenced(self, schema: Schema, path: str) -> Mapping[str, Any] | Literal[False]:
        """What a chain of references ends in, with what stands beside them merged in."""
        for _ in range(_MAX_REFERENCES):
            if isinstance(schema, bool):
                return {} if schema else False
            if not isinstance(schema, Mapping):
                raise SchemaError(path, "a schema must be an object or a boolean")
            if "$ref" not in schema:
                return schema
            rest, target = _rest(schema, "$ref"), self._target(schema["$ref"], path)
            if target is None:
                return rest
            schema = self._merged(target, rest, path) if rest and isinstance(target, Mapping) else target
        raise SchemaError(path, "references lead to each other without end")

    def _merged(self, a: Mapping[str, Any], b: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Both schemas at once; where no plain schema says that, `a` alone, which is noted."""
        try:
            return merge(a, b)
        except ConflictError as error:
            self.unfollowed.append(f"{path or '/'} ({error})")
            return a
        except (TypeError, AttributeError):
            raise SchemaError(path, "keywords of the wrong type") from None

    def _spread(self, schema: Mapping[str, Any], path: str, depth: int) -> list[Schema] | None:
        """The alternatives of `anyOf` or `oneOf`, each with the rest of the schema merged in; None without."""
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            rest = _rest(schema, keyword)
            parts: list[Schema] = []
            for i, part in enumerate(_list(schema[keyword], f"{path}/{keyword}")):
                piece = self._resolved(part, f"{path}/{keyword}/{i}", depth + 1) if rest else part
                parts.append(self._merged(piece, rest, path) if rest and isinstance(piece, Mapping) else piece)
            return parts
        return None

    def _target(self, reference: object, path: str) -> Schema | None:
        """What a reference within the document names; None, noted, for one that leads elsewhere."""
        if not isinstance(reference, str):
            raise SchemaError(path, "$ref must be a string")
        if reference != "#" and not reference.startswith("#/"):
            self.unfollowed.append(f"{path}/$ref")
            return None
        found: Any = self._root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError(path, f"$ref {reference!r:.100} leads nowhere")
        return found

    def _values(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        """The values of `enum` and `const` that the schema's `type` admits; other keywords beside them are noted."""
        values = _list(schema["enum"], f"{path}/enum") if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if value == schema["const"]]
        beside = [key for keywords in _OF_KIND.values() for key in keywords if key in schema]
        self.unfollowed += [f"{path}/{key}" for key in beside]
        if "type" in schema:
            names = types_of(schema, path)
            values = [value for value in values if any(_is(value, name) for name in names)]
        return values


def types_of(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types a schema names; without any, those its keywords speak of, else all. No integer stands beside number.

    Raises `SchemaError` for a type that JSON does not have.
    """
    spoken = [kind for kind, keywords in _OF_KIND.items() if not schema.keys().isdisjoint(keywords)]
    given = schema.get("type", spoken or list(KINDS))
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names:
        raise SchemaError(f"{path}/type", "type must be a name or a list of names")
    for name in names:
        if name not in (*KINDS, "integer"):
            raise SchemaError(f"{path}/type", f"there is no type {name!r:.100}")
    return [n for n in dict.fromkeys(names) if n != "integer" or "number" not in names]


def _by_kind(values: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One enumeration for each kind of value."""
    for kind in KINDS:
        found = [value for value in values if _is(value, kind)]
        if found:
            yield kind, {"enum": found}


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, (int, float)):
        return name == "number" or (name == "integer" and value == int(value))
    return name == {str: "string", list: "array", dict: "object"}.get(type(value))


def _rest(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    """What a schema says beside `keyword`, annotations left out."""
    return {key: value for key, value in schema.items() if key != keyword and key not in _ANNOTATIONS}


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(path, "must be a list")
    return value


def _object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(path, "must be an object")
    return value


def _check_bounds(kept: dict[str, Any], keywords: tuple[str, str], path: str) -> None:
    """Bounds are whole numbers, and not the wrong way round."""
    low, high = (kept.get(keyword) for keyword in keywords)
    for keyword, value in zip(keywords, (low, high), strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31):
            raise SchemaError(f"{path}/{keyword}", "must be a whole number below 2**31")
    if low is not None and high is not None and low > high:
        raise SchemaError(f"{path}/{keywords[0]}", f"is more than {keywords[1]}")
