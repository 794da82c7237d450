"""A body of Anthropic's `/v1/messages` as the body of a chat completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from k3hal.errors import RequestError
from k3hal.serve.efforts import folded_effort
from k3hal.serve.messages.conversation import Conversation

OWN_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""What a chat completion calls otherwise."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class CountRequest(BaseModel):
    """`POST /v1/messages/count_tokens`; what shapes the prompt is read by `chat_body`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    RENDERED: ClassVar = (
        "cache_control", "container", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id",
        "context_management", "betas",
    )  # fmt: skip

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`; `priority` and `cache_salt` mean what they do in a chat completion."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


def chat_body(asked: CountRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """The chat completion that asks for the same, and what the request calls the fields of it that may be wrong.

    Raises `RequestError` naming the field that is.
    """
    conversation = Conversation(asked.system, asked.messages)
    body: dict[str, Any] = {"model": asked.model, "messages": conversation.out}
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ()) if not _built_in(tool)]
    if tools:
        body["tools"] = tools
    if asked.tool_choice is not None:
        body |= _tool_choice(asked.tool_choice)
    if asked.thinking is not None:
        body["thinking"] = _thinking(asked.thinking)
    config = asked.output_config or {}
    if config.get("effort") is not None:
        body["thinking_effort"] = folded_effort(config["effort"], "output_config.effort")
    if config.get("format") is not None:
        body["response_format"] = _format(config["format"])
    if isinstance(asked, MessagesRequest):
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream", "priority", "cache_salt")
        body |= {name: getattr(asked, name) for name in same} | {"stop": asked.stop_sequences}
    return body, OWN_NAMES | conversation.names


def left_out(asked: CountRequest) -> list[str]:
    """The tools that only Anthropic's models know, whose schema a request does not have."""
    return [f"tools[{i}].{tool['type']}" for i, tool in enumerate(asked.tools or ()) if _built_in(tool)]


def _built_in(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") not in (None, "custom")


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    if not isinstance(tool.get("input_schema"), Mapping):
        raise RequestError(f"{where}.input_schema must be an object", param=f"{where}.input_schema")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise RequestError(f"{where}.name must be a non-empty string", param=f"{where}.name")
    if not isinstance(tool.get("strict"), (bool, type(None))):
        raise RequestError(
            f"{where}.strict must be true or false, got {tool['strict']!r:.100}", param=f"{where}.strict"
        )
    function: dict[str, Any] = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        value: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        value = _CHOICES[kind]
    else:
        raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {kind!r:.100}", param="tool_choice")
    return {"tool_choice": value, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def _thinking(thinking: Mapping[str, Any]) -> bool:
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise RequestError(f"thinking.type must be one of {', '.join(_THINKING)}, got {kind!r:.100}", param="thinking")
    return _THINKING[kind]


def _format(value: object) -> dict[str, Any]:
    schema = value.get("schema") if isinstance(value, Mapping) and value.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            'output_config.format must be {"type": "json_schema", "schema": {…}}', param="output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
