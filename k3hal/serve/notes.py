"""The system notes the model was trained on; their texts are part of the format and must not be edited."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3hal.serve.xtml import Segment, message

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def tool_declaration(tools: Sequence[Mapping[str, Any]]) -> Iterator[Segment]:
    return _note("tool-declare", _TOOLS.format(_sorted_json(tools)))


def dynamic_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[Segment]:
    """Tools that a system message adds in the middle of a conversation."""
    return _note("tool-declare", _NEW_TOOLS.format(_sorted_json(tools)))


def thinking_effort(effort: str) -> Iterator[Segment]:
    return _note("thinking-effort", _EFFORT.format(effort))


def tool_choice(choice: str) -> Iterator[Segment]:
    """The note of `required` or `none`; other choices have none."""
    if choice in _TOOL_CHOICE:
        yield from _note("tool-choice", _TOOL_CHOICE[choice])


def response_format(kind: str, schema: Mapping[str, Any] | None) -> Iterator[Segment]:
    """The note of `json_object`, or of `json_schema` with its schema; other kinds have none."""
    if kind not in ("json_object", "json_schema"):
        return
    text = _FORMAT.format(kind)
    if schema is not None:
        text += _SCHEMA.format(_sorted_json(schema))
    yield from _note("response-format", text)


def _note(kind: str, text: str) -> Iterator[Segment]:
    return message((("role", "system"), ("type", kind)), [Segment(text)])


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
