"""Checks of `tools`, `tool_choice` and `response_format` before anything is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3hal.errors import RequestError


@dataclass(frozen=True, slots=True)
class ToolSetup:
    """`choice` is auto, none, required or named; `names` holds every declared tool, dynamic ones included."""

    declared: tuple[Mapping[str, Any], ...]
    names: frozenset[str]
    choice: str
    forced: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    kind: str = "text"
    schema: Mapping[str, Any] | None = None


def read_tools(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> ToolSetup:
    """The declared tools and the tool choice; names are unique over the request and its dynamic tools."""
    declared = _tool_list(body.get("tools"), "tools")
    names: set[str] = set()
    lists = [("tools", declared)]
    lists += [
        (f"messages[{i}].tools", _tool_list(m.get("tools"), f"messages[{i}].tools")) for i, m in enumerate(messages)
    ]
    for param, tools in lists:
        for tool in tools:
            name = tool["function"]["name"]
            if name in names:
                raise RequestError(f"the tool name {name!r} appears twice", param=param)
            names.add(name)
    choice, forced = _tool_choice(body.get("tool_choice"), names)
    return ToolSetup(tuple(declared), frozenset(names), choice, forced)


def _tool_list(value: object, param: str) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{param} must be a list", param=param)
    for i, tool in enumerate(value):
        where = f"{param}[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(f'{where} must be an object with "type": "function"', param=where)
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.function must be an object", param=where)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.function.name must be a non-empty string", param=where)
    return value


def _tool_choice(value: object, names: set[str]) -> tuple[str, str | None]:
    if value is None:
        return "auto", None
    if isinstance(value, Mapping):
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if value.get("type") != "function" or not isinstance(name, str):
            raise RequestError('tool_choice must be {"type": "function", "function": {"name": …}}', param="tool_choice")
        if name not in names:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return "named", name
    if not isinstance(value, str) or value not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice must be auto, none, required or a function, got {value!r}", param="tool_choice"
        )
    if value == "required" and not names:
        raise RequestError("tool_choice is required but the request has no tools", param="tool_choice")
    return value, None


def read_response_format(value: object) -> ResponseFormat:
    """The requested answer format; a JSON schema must be named and an object."""
    if value is None:
        return ResponseFormat()
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}", param="response_format"
        )
    if kind != "json_schema":
        return ResponseFormat(kind)
    return ResponseFormat(kind, _schema(value.get("json_schema")))


def _schema(value: object) -> Mapping[str, Any]:
    param = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} must be an object", param=param)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise RequestError(f"{param}.name must be a non-empty string", param=f"{param}.name")
    if not isinstance(value.get("strict"), (bool, type(None))):
        raise RequestError(f"{param}.strict must be true or false, got {value['strict']!r}", param=f"{param}.strict")
    schema = value.get("schema", value.get("json_schema"))
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param}.schema must be an object", param=f"{param}.schema")
    return schema
