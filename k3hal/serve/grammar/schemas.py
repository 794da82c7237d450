"""JSON schemas as a grammar can follow them: references kept local, combinations merged, the rest reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from k3hal.serve.grammar.formats import FORMATS
from k3hal.serve.grammar.keywords import (
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_MULTIPLE,
    MAX_REFERENCES,
    MAX_SCHEMAS,
    NOT_FOLLOWED,
    ODD_PATTERN,
    OF_KIND,
    Schema,
    SchemaError,
    as_list,
    as_object,
    by_kind,
    check_bounds,
    is_of,
    rest_of,
    types_of,
)
from k3hal.serve.grammar.merge import ConflictError, merge


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
            yield from by_kind(self._values(whole, path))
            return
        for name in types_of(whole, path):
            kind = "number" if name == "integer" else name
            yield kind, self._of_kind(whole, kind, name, path, depth)

    def _child(self, schema: Schema, path: str, depth: int) -> dict[str, Any]:
        """One schema that allows the same values; one named by a reference is defined once, so that it may recur."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and not rest_of(schema, "$ref"):
            return self._defined(schema["$ref"], schema, path, depth)
        if schema is True or (isinstance(schema, Mapping) and not rest_of(schema, "")):
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
        for keyword in OF_KIND.get(kind, ()):
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
        check_bounds(kept, ("minLength", "maxLength"), path)
        pattern = kept.get("pattern")
        if pattern is None:
            if kept.keys().isdisjoint(("minLength", "maxLength")) and schema.get("format") in FORMATS:
                kept["pattern"] = f"^{FORMATS[schema['format']]}$"
            return
        if not isinstance(pattern, str):
            raise SchemaError(f"{path}/pattern", "a pattern must be a string")
        if ODD_PATTERN.search(pattern):
            self.unfollowed.append(f"{path}/pattern")
            del kept["pattern"]
        else:
            self._leave_out(kept, ("minLength", "maxLength"), path)

    def _number(self, kept: dict[str, Any], path: str) -> None:
        for keyword in OF_KIND["number"]:
            value = kept.get(keyword)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SchemaError(f"{path}/{keyword}", "must be a number")
            if value is not None and abs(value) > MAX_INTEGER:
                self._leave_out(kept, (keyword,), path)
        multiple = kept.get("multipleOf")
        bounded = len(kept) > 2
        if multiple is not None and (
            kept["type"] != "integer" or bounded or multiple != int(multiple) or not 0 < multiple <= MAX_MULTIPLE
        ):
            self._leave_out(kept, ("multipleOf",), path)

    def _array(self, kept: dict[str, Any], path: str, depth: int) -> None:
        check_bounds(kept, ("minItems", "maxItems"), path)
        items = kept.pop("items", True)
        if isinstance(items, list):  # what prefixItems was called before 2020
            kept["prefixItems"], items = items, kept.get("additionalItems", True)
        kept.pop("additionalItems", None)
        prefix = as_list(kept.pop("prefixItems", []), f"{path}/prefixItems")
        if prefix:
            kept["prefixItems"] = [
                self._child(part, f"{path}/prefixItems/{i}", depth + 1) for i, part in enumerate(prefix)
            ]
            kept["minItems"] = max(kept.get("minItems", 0), len(prefix))
        kept["items"] = False if items is False else self._child(items, f"{path}/items", depth + 1)

    def _object(self, kept: dict[str, Any], path: str, depth: int) -> None:
        check_bounds(kept, ("minProperties", "maxProperties"), path)
        declared = "properties" in kept
        properties = as_object(kept.get("properties", {}), f"{path}/properties")
        required = as_list(kept.get("required", []), f"{path}/required")
        if not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{path}/required", "must be a list of names")
        extra = kept.pop("additionalProperties", None)
        patterns = as_object(kept.pop("patternProperties", {}), f"{path}/patternProperties")
        if patterns:
            self.unfollowed.append(f"{path}/patternProperties")
        closed = extra is False
        if extra is None:
            extra = not declared or bool(patterns)
        if kept.get("maxProperties") == 0:
            extra = False
        named = {name: self._property(name, schema, path, depth) for name, schema in properties.items()}
        for name in required:
            if name not in named:
                if closed:
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
        for i, part in enumerate(as_list(whole.get("allOf", []), f"{path}/allOf")):
            piece = self._resolved(part, f"{path}/allOf/{i}", depth + 1)
            if piece is False:
                return False
            whole = self._merged({key: value for key, value in whole.items() if key != "allOf"}, piece, path)
        for keyword in NOT_FOLLOWED:
            if whole.get(keyword, False) is not False:
                self.unfollowed.append(f"{path}/{keyword}")
        return whole

    def _dereferenced(self, schema: Schema, path: str) -> Mapping[str, Any] | Literal[False]:
        """What a chain of references ends in, with what stands beside them merged in."""
        for _ in range(MAX_REFERENCES):
            if isinstance(schema, bool):
                return {} if schema else False
            if not isinstance(schema, Mapping):
                raise SchemaError(path, "a schema must be an object or a boolean")
            if "$ref" not in schema:
                return schema
            rest, target = rest_of(schema, "$ref"), self._target(schema["$ref"], path)
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
            rest = rest_of(schema, keyword)
            parts: list[Schema] = []
            for i, part in enumerate(as_list(schema[keyword], f"{path}/{keyword}")):
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
            elif (
                isinstance(found, list)
                and key.isascii()
                and key.isdecimal()
                and len(key) < 20
                and int(key) < len(found)
            ):
                found = found[int(key)]
            else:
                raise SchemaError(path, f"$ref {reference!r:.100} leads nowhere")
        return found

    def _values(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        """The values of `enum` and `const` that the schema's `type` admits; other keywords beside them are noted."""
        values = as_list(schema["enum"], f"{path}/enum") if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if value == schema["const"]]
        beside = [key for keywords in OF_KIND.values() for key in keywords if key in schema]
        self.unfollowed += [f"{path}/{key}" for key in beside]
        if "type" in schema:
            names = types_of(schema, path)
            values = [value for value in values if any(is_of(value, name) for name in names)]
        return values
