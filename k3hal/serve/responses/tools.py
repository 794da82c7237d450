"""The tools of a responses request: as a chat declares them, and how their calls are told again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3hal.errors import RequestError

INPUT = "input"
"""The one argument of a custom tool, which takes free text, as the function it is declared as."""

_FUNCTION_FIELDS = ("description", "parameters", "strict")


@dataclass(slots=True)
class Toolbox:
    """`declared` are a chat's tools. `spaces` has the namespace and own name of those that are in one.

    `custom` names tools of free text. `left_out` are those that only another server has.
    """

    declared: list[dict[str, Any]] = field(default_factory=list)
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def spaced(namespace: object, name: object) -> Any:
    """The name under which a function of a namespace is declared."""
    return f"{namespace}.{name}" if namespace and isinstance(name, str) else name


def read_tools(tools: Sequence[Any]) -> Toolbox:
    """Functions, alone and in namespaces, and custom tools. Raises `RequestError` for what is no tool at all."""
    box = Toolbox()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise RequestError(f"{where} must be an object with a type", param=where)
        if tool["type"] == "namespace":
            _read_space(tool, where, box)
        elif not _read_one(tool, tool.get("name"), where, box):
            box.left_out.append(f"{where}.{tool['type']}")
    return box


def _read_space(space: Mapping[str, Any], where: str, box: Toolbox) -> None:
    inner = space.get("tools")
    if not isinstance(space.get("name"), str) or not space["name"] or not isinstance(inner, list):
        raise RequestError(f"{where} must have a name and a list of tools", param=where)
    for k, tool in enumerate(inner):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise RequestError(f"{where}.tools[{k}] must be an object with a name", param=f"{where}.tools[{k}]")
        name = spaced(space["name"], tool["name"])
        if _read_one(tool, name, f"{where}.tools[{k}]", box):
            box.spaces[name] = (space["name"], tool["name"])
        else:
            box.left_out.append(f"{where}.tools[{k}].{tool.get('type')}")


def _read_one(tool: Mapping[str, Any], name: object, where: str, box: Toolbox) -> bool:
    """Declare a tool; False for one that is built into another server."""
    if tool.get("type") not in ("function", "custom"):
        return False
    _check(tool, name, where, box)
    if tool["type"] == "function":
        function = {"name": name} | {key: tool[key] for key in _FUNCTION_FIELDS if tool.get(key) is not None}
    else:
        box.custom.add(str(name))
        function = {"name": name, "description": "\n".join(_about(tool)), "parameters": _FREE_TEXT}
    box.declared.append({"type": "function", "function": function})
    return True


def _check(tool: Mapping[str, Any], name: object, where: str, box: Toolbox) -> None:
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be a non-empty string", param=f"{where}.name")
    if any(name == one["function"]["name"] for one in box.declared):
        raise RequestError(f"{where}.name: the tool name {name!r:.100} appears twice", param=f"{where}.name")
    if not isinstance(tool.get("parameters"), (Mapping, type(None))):
        raise RequestError(f"{where}.parameters must be a JSON schema, an object", param=f"{where}.parameters")
    if not isinstance(tool.get("strict"), (bool, type(None))):
        raise RequestError(
            f"{where}.strict must be true or false, got {tool['strict']!r:.100}", param=f"{where}.strict"
        )


def _about(tool: Mapping[str, Any]) -> Iterator[str]:
    """What a custom tool says of itself, its grammar included, which only the model can follow."""
    if isinstance(tool.get("description"), str):
        yield tool["description"]
    form = tool.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        yield f"The input follows this grammar ({form.get('syntax')}):\n{form['definition']}"


_FREE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
