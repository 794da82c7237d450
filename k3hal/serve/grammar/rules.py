"""The text of a grammar being written: rules in Lark's notation, and grammars they refer to by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from k3hal.serve.grammar.closing import closed_where_needed
from k3hal.tokenizer import CLOSE, OPEN, SEP, Tokenizer


class Marks(NamedTuple):
    """The control tokens of the markup, as a grammar names tokens: by id, so that no text can stand for them."""

    open: str
    close: str
    sep: str


class Rules:
    """Collects rules. Equal rules are written once.

    `values` are the grammars a rule refers to: under a name, what kind of grammar, and what it is made of.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.marks = Marks(*(f"<[{tokenizer.special(name)}]>" for name in (OPEN, CLOSE, SEP)))
        self.values: dict[str, tuple[str, Any]] = {}
        self._ordinary = f"<[^{tokenizer.special_base}-{tokenizer.vocab_size - 1}]>*"
        self._lines: dict[str, str] = {}
        self._known: dict[str, str] = {}

    def source(self, start: str) -> str:
        """The whole grammar, beginning at rule `start`."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._lines.items())])

    def reserve(self, prefix: str) -> str:
        """A name for a rule that will be defined."""
        name = f"{prefix}_{len(self._lines)}"
        self._lines[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._lines[name] = body

    def add(self, prefix: str, body: str) -> str:
        """The name of a rule of that body."""
        if body not in self._known:
            name = self._known[body] = self.reserve(prefix)
            self.define(name, body)
        return self._known[body]

    def any_of(self, prefix: str, options: Sequence[str]) -> str:
        """One of `options`; the empty string if there are none."""
        return self.add(prefix, " | ".join(dict.fromkeys(options))) if options else ""

    def element(self, tag: str, body: str) -> str:
        """An element without attributes."""
        return f"{self.opening(tag)} {body} {self.closing(tag)}"

    def opening(self, tag: str) -> str:
        return f'{self.marks.open} "{tag}" {self.marks.sep}'

    def closing(self, tag: str) -> str:
        return f'{self.marks.close} "{tag}" {self.marks.sep}'

    def text(self) -> str:
        """Any text: tokens, whatever their bytes are, but no control token."""
        return self.add("text", self._ordinary)

    def characters(self, low: int, high: int | None) -> str:
        """From `low` to `high` characters."""
        one = self.add("character", regex(r"[\x00-\ud7ff\ue000-\U0010ffff]"))
        return self.add("characters", f"{one}{{{low},{'' if high is None else high}}}")

    def json(self, schema: Mapping[str, Any], separators: tuple[str, str] | None) -> str:
        """JSON that satisfies a schema the compiler follows; without `separators` with any spaces, within reason."""
        return self._value("json", (json.dumps(closed_where_needed(schema)), separators))

    def matching(self, pattern: str) -> str:
        return self._value("regex", pattern)

    def grammar(self, source: str) -> str:
        """What a grammar of the client's own allows."""
        return self._value("grammar", source)

    def _value(self, kind: str, of: Any) -> str:
        key = f"{kind} {of}"
        if key not in self._known:
            name = f"value_{len(self.values)}"
            self.values[name] = (kind, of)
            self._known[key] = f"@{name}"
        return self._known[key]


def literal(text: str) -> str:
    """A text as it is."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def regex(pattern: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/"
