"""The arguments of a tool call as rules of a grammar: one element for each, in any order, each of a declared type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3hal.serve.grammar.rules import Rules, literal, regex
from k3hal.serve.grammar.schemas import SchemaReader
from k3hal.serve.xtml import escape

MAX_EXACT = 6
"""Up to so many properties, none comes twice: there is a rule for each set of those that are left."""
MAX_REQUIRED = 8
"""Up to so many required properties among more, these come in any order; beyond it in the order of the schema."""

_LONGEST_KEY = 64
_KEY_CHARACTER = r'[^\x00-\x1f"&%s]'


class ArgumentRules:
    """Adds the rules of tools' arguments to `rules`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def anything(self) -> str:
        """Any arguments at all."""
        return self._rules.add("arguments", f"({self._extra({})})*")

    def of(self, reader: SchemaReader) -> str:
        """The arguments that the schema of `reader` allows. Raises `SchemaError`; no rule if there are none."""
        found = [self._object(reader, part) for kind, part in reader.alternatives() if kind == "object"]
        return self._rules.any_of("arguments", found)

    def _object(self, reader: SchemaReader, schema: Mapping[str, Any]) -> str:
        elements = {name: self._element(reader, name, part) for name, part in schema["properties"].items()}
        extra = schema["additionalProperties"]
        reader.unfollowed += [f"/{keyword}" for keyword in ("minProperties", "maxProperties") if schema.get(keyword)]
        more = None
        if extra is not False:
            more = self._extra(elements, reader.complete(extra) if isinstance(extra, dict) else None)
        required = tuple(dict.fromkeys(schema["required"]))
        if len(elements) <= MAX_EXACT:
            return self._sets(elements, frozenset(required), frozenset(elements), more)
        optional = [rule for name, rule in elements.items() if name not in required]
        free = self._rules.any_of("optional", [*optional, *([more] if more else [])])
        if len(required) <= MAX_REQUIRED:
            return self._sets({n: elements[n] for n in required}, frozenset(required), frozenset(required), free)
        between = f"{free}*" if free else ""
        return self._rules.add("arguments", " ".join([between, *(f"{elements[n]} {between}" for n in required)]))

    def _sets(
        self, elements: Mapping[str, str], required: frozenset[str], left: frozenset[str], free: str | None
    ) -> str:
        """What may come while the elements `left` have not, and `free` ones any time; a rule for each set."""
        made: dict[frozenset[str], str] = {}

        def rule(left: frozenset[str]) -> str:
            if left not in made:
                name = made[left] = self._rules.reserve("left")
                options = [f"{elements[n]} {rule(left - {n})}" for n in elements if n in left]
                options += [f"{free} {name}"] if free else []
                options += ['""'] if left.isdisjoint(required) else []
                self._rules.define(name, " | ".join(options))
            return made[left]

        return rule(left)

    def _element(self, reader: SchemaReader, name: str, schema: dict[str, Any]) -> str:
        """The element of one property: for each kind of value it may have, the type and the value."""
        return self._rules.add("argument", self._tagged(literal(escape(name)), self._kinds(reader.complete(schema))))

    def _extra(self, names: Mapping[str, Any], values: dict[str, Any] | None = None) -> str:
        """An element of any other name. Its values are those that `values` allows, or any."""
        kinds = self._kinds(values or {})
        return self._rules.add("extra", self._tagged(self._other_key([escape(name) for name in names]), kinds))

    def _kinds(self, schema: dict[str, Any]) -> list[tuple[str, str]]:
        """The kinds of value a schema allows, each with the rule of such values."""
        reader = SchemaReader(schema)
        return [(kind, self._value(kind, reader.complete(part))) for kind, part in reader.alternatives()]

    def _tagged(self, key: str, kinds: Sequence[tuple[str, str]]) -> str:
        marks = self._rules.marks
        values = " | ".join(f'"{kind}\\"" {marks.sep} {value}' for kind, value in kinds)
        head = f'{marks.open} "argument key=\\"" {key} "\\" type=\\""'
        return f'{head} ({values}) {marks.close} "argument" {marks.sep}'

    def _other_key(self, names: Sequence[str], prefix: str = "") -> str:
        """A key that is none of `names`, which all begin with `prefix` and are as escaped as keys are written.

        Keys that would need an escape are not written at all.
        """
        following = sorted({name[len(prefix)] for name in names if name != prefix})
        others = "".join(f"\\u{{{ord(char):x}}}" for char in following)
        options = [f"{regex(_KEY_CHARACTER % others)} {regex(_KEY_CHARACTER % '')}{{0,{_LONGEST_KEY - 1}}}"]
        for char in following:
            if char not in '"&':
                deeper = [name for name in names if name.startswith(prefix + char)]
                options.append(f"{literal(char)} {self._other_key(deeper, prefix + char)}")
        if prefix and prefix not in names:
            options.append('""')
        return self._rules.add("key", " | ".join(options))

    def _value(self, kind: str, schema: Mapping[str, Any]) -> str:
        """What stands in an element: text as it is for a string, JSON spaced as the model has seen it for the rest."""
        if kind != "string":
            return self._rules.json(schema, (", ", ": "))
        if "enum" in schema:
            return self._rules.any_of("choice", [literal(value) for value in schema["enum"]])
        if "pattern" in schema:
            return self._rules.matching(schema["pattern"])
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        return self._rules.text() if low == 0 and high is None else self._rules.characters(low, high)
