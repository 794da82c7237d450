"""Reading fields of a parsed TOML or YAML document, with errors that name the file and the key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from k3hal.dispatch.words import nearest
from k3hal.errors import InputError

_REQUIRED = object()
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Node:
    """One mapping of a document. What is read is remembered, so that `unused` can name what nobody asked for."""

    def __init__(self, value: Any, where: str) -> None:
        """`where` is the file, with the keys that lead here. Raises `InputError` where `value` is no mapping."""
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise InputError(f"{where}: expected a mapping with names as keys, found {_kind(value)}")
        self.data: Mapping[str, Any] = value
        self.where = where
        self._asked: set[str] = set()
        self._children: dict[str, Node] = {}

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._typed(key, str, "a text", default)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._typed(key, bool, "true or false", default)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A positive integer or float."""
        value = self._typed(key, int | float, "a number", default)
        if value is not default and (isinstance(value, bool) or not 0 < value < 1e15):
            raise InputError(f"{self.where}: {key} is {value!r}", hint="expected a positive number")
        return value

    def whole(self, key: str, default: Any = _REQUIRED) -> Any:
        """A positive integer."""
        value = self.number(key, default)
        if value is not default and not isinstance(value, int):
            raise InputError(f"{self.where}: {key} is {value!r}", hint="expected a whole number")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = ()) -> Any:
        """A list of texts; numbers in it count as their text, as YAML writers leave out quotes."""
        value = self._typed(key, list, "a list of texts", default)
        if value is default:
            return default
        for item in value:
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                raise InputError(f"{self.where}: {key} holds {_kind(item)}", hint="expected a list of texts")
        return tuple(map(str, value))

    def strings(self, key: str) -> dict[str, str]:
        """A mapping of names to texts, such as an environment."""
        node = self.child(key)
        for name, value in node.data.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise InputError(f"{node.where}: {name} is {_kind(value)}", hint="expected a text")
        node.take_all()
        return {name: str(value) for name, value in node.data.items()}

    def environment(self, key: str) -> dict[str, str]:
        """A mapping of variables' names to texts: a name is written into scripts as it stands."""
        out = self.strings(key)
        for name in out:
            if not _VARIABLE.fullmatch(name):
                raise InputError(f"{self.where}: {key}: {name!r:.40} is no variable's name", hint="like UCX_TLS")
        return out

    def child(self, key: str) -> Node:
        """The mapping under `key`, empty where there is none."""
        self._asked.add(key)
        if key not in self._children:
            self._children[key] = Node(self.data[key] if self.has(key) else {}, f"{self.where}: {key}")
        return self._children[key]

    def children(self, key: str) -> Iterator[tuple[str, Node]]:
        """The mappings under `key`, by name, in the file's order."""
        parent = self.child(key)
        for name in parent.data:
            yield name, parent.child(name)

    def raw(self, key: str) -> Any:
        self._asked.add(key)
        return self.data.get(key)

    def take_all(self) -> None:
        self._asked.update(self.data)

    def unused(self) -> list[str]:
        return [key for key in self.data if key not in self._asked]

    def unused_below(self) -> list[str]:
        """Keys that nobody asked for, here and in every mapping below, with the keys that lead to them."""
        below = [f"{key}.{name}" for key, child in self._children.items() for name in child.unused_below()]
        return [*self.unused(), *below]

    def refuse_unknown(self, known: tuple[str, ...]) -> None:
        """Raise `InputError` for a key outside `known`."""
        for key in self.data:
            if key not in known:
                raise InputError(f"{self.where}: unknown key {key!r}", hint=nearest(key, known))

    def _typed(self, key: str, kind: Any, what: str, default: Any) -> Any:
        self._asked.add(key)
        if not self.has(key):
            if default is _REQUIRED:
                raise InputError(f"{self.where}: {key!r} is missing", hint=f"expected {what}")
            return default
        value = self.data[key]
        if not isinstance(value, kind):
            raise InputError(f"{self.where}: {key} is {_kind(value)}", hint=f"expected {what}")
        return value


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'}"
    return "nothing" if value is None else repr(value)[:60]
