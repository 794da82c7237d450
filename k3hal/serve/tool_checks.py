"""Checks of `tools` and `tool_choice` before anything is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3hal.errors import RequestError

Tool = Mapping[str, Any]
_FUNCTION_CHOICE = '{"type": "function", "function": {"name": …}}'


@dataclass(frozen=True, slots=True)
class ToolSetup:
    """What a request says about tools.

    `declared` are those of the request itself, `all` also those its messages add, by name. `choice` is auto, none,
    required or named; `allowed` are the tools that may be called, one if `choice` is named. `parallel` allows several
    calls in an answer.
    """

    declared: tuple[Tool, ...]
    all: Mapping[str, Tool]
    choice: str
    allowed: tuple[str, ...]
    parallel: bool = True


def read_tools(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> ToolSetup:
    """The declared tools and the tool choice; names are unique over the request and its dynamic tools."""
    declared = _tool_list(body.get("tools"), "tools")
    lists = [("tools", declared)]
    for i, item in enumerate(messages):
        lists.append((f"messages[{i}].tools", _tool_list(item.get("tools"), f"messages[{i}].tools")))
    tools: dict[str, Tool] = {}
    for param, entries in lists:
        for i, tool in enumerate(entries):
            name = tool["function"]["name"]
            if name in tools:
                raise RequestError(f"the tool name {name!r:.100} appears twice", param=f"{param}[{i}].function.name")
            tools[name] = tool
    choice, allowed = _tool_choice(body.get("tool_choice"), tools)
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, (bool, type(None))):
        raise RequestError(
            f"parallel_tool_calls must be true or false, got {parallel!r:.100}", param="parallel_tool_calls"
        )
    return ToolSetup(tuple(declared), tools, choice, allowed, parallel is not False)


def _tool_list(value: object, param: str) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{param} must be a list", param=param)
    for i, tool in enumerate(value):
        _check_tool(tool, f"{param}[{i}]")
    return value


def _check_tool(tool: object, where: str) -> None:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    if tool.get("type") != "function":
        raise RequestError(f'{where}.type must be "function", got {tool.get("type")!r:.100}', param=f"{where}.type")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where}.name must be a non-empty string", param=f"{where}.name")
    if not isinstance(function.get("parameters"), (Mapping, type(None))):
        raise RequestError(f"{where}.parameters must be a JSON schema, an object", param=f"{where}.parameters")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise RequestError(
            f"{where}.strict must be true or false, got {function['strict']!r:.100}", param=f"{where}.strict"
        )


def _tool_choice(value: object, tools: Mapping[str, Tool]) -> tuple[str, tuple[str, ...]]:
    """The choice, and the names of the tools it allows."""
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed_tools(value, tools)
    if isinstance(value, Mapping):
        if value.get("type") != "function":
            raise RequestError(f"tool_choice must be {_FUNCTION_CHOICE}", param="tool_choice")
        return "named", (_named(value, tools, "tool_choice"),)
    value = "auto" if value is None else value
    if not isinstance(value, str) or value not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice must be auto, none, required or a function, got {value!r:.100}", param="tool_choice"
        )
    if value == "required" and not tools:
        raise RequestError("tool_choice is required but the request has no tools", param="tool_choice")
    return value, () if value == "none" else tuple(tools)


def _allowed_tools(value: Mapping[str, Any], tools: Mapping[str, Tool]) -> tuple[str, tuple[str, ...]]:
    """OpenAI's choice among some of the declared tools."""
    given, where = value.get("allowed_tools"), "tool_choice.allowed_tools"
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    mode, entries = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{where}.mode must be auto or required, got {mode!r:.100}", param=f"{where}.mode")
    if not isinstance(entries, list) or not entries:
        raise RequestError(f"{where}.tools must be a non-empty list", param=f"{where}.tools")
    names = [_named(entry, tools, f"{where}.tools[{i}]") for i, entry in enumerate(entries)]
    return mode, tuple(dict.fromkeys(names))


def _named(value: object, tools: Mapping[str, Tool], param: str) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"{param} must be {_FUNCTION_CHOICE}", param=param)
    if name not in tools:
        raise RequestError(f"{param} names {name!r:.100}, which is not among the tools", param=param)
    return name
