"""A tool call's arguments as JSON text that grows while the model writes them."""

from __future__ import annotations

import json
from typing import NoReturn

import orjson


class CallBuilder:
    """Turns argument elements into fragments of one JSON object; joined, the fragments are the call's `arguments`.

    A string argument streams as it comes. Any other type is held until it is whole: it is passed on as written if it is
    JSON, else as a JSON string of the raw text. A `json` element is passed on untouched; whichever of the two forms
    comes second is ignored.
    """

    __slots__ = ("_is_string", "_raw", "_value", "name", "started")

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False
        self._raw = False
        self._is_string = False
        self._value: list[str] = []

    def open_argument(self, key: str, kind: str) -> str:
        self._value.clear()
        self._is_string = kind == "string" and not self._raw
        if self._raw:
            return ""
        lead = "," if self.started else "{"
        self.started = True
        return f"{lead}{orjson.dumps(key).decode()}:{chr(34) if self._is_string else ''}"

    def text(self, text: str) -> str:
        """More of the open argument's value."""
        if self._is_string:
            return orjson.dumps(text)[1:-1].decode()
        self._value.append(text)
        return ""

    def close_argument(self) -> str:
        if self._is_string:
            return '"'
        if self._raw:
            return ""
        value = "".join(self._value)
        return value if _is_json(value) else orjson.dumps(value).decode()

    def raw_text(self, text: str) -> str:
        """More of a `json` element."""
        if self.started and not self._raw:
            return ""
        self.started = self._raw = self._raw or bool(text)
        return text

    def close(self) -> str:
        if self._raw:
            return ""
        return "}" if self.started else "{}"


def _is_json(text: str) -> bool:
    """Whether the text is JSON, be its numbers beyond any float."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return _is_json_with_huge_numbers(text)
    return True


def _is_json_with_huge_numbers(text: str) -> bool:
    try:
        json.loads(text, parse_float=str, parse_int=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
