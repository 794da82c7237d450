"""A body of Anthropic's `/v1/messages` as the body of a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from k3hal.errors import RequestError
from k3hal.serve.efforts import folded_effort
from k3hal.serve.opaque import unseal

RAW_INPUT = "__raw_arguments__"
"""The one key of a tool's input that stands for arguments which are no JSON object."""

OWN_NAMES = {"response_format.json_schema": "output_config.format", "response_format": "output_config.format"}
"""What a chat completion calls otherwise."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
# What Claude Code puts before its system prompt: a note about the client, another one each time.
_BILLING = "x-anthropic-billing-header:"


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


def chat_body(asked: CountRequest) -> dict[str, Any]:
    """The chat completion that asks for the same. Raises `RequestError` naming the field that is wrong."""
    body: dict[str, Any] = {"model": asked.model, "messages": [*_system(asked.system), *_messages(asked.messages)]}
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
    return body


def _system(system: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    parts = [_part(block, f"system[{i}]") for i, block in enumerate(system)]
    return [{"role": "system", "content": [part for part in parts if not part["text"].startswith(_BILLING)]}]


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a chat: tool results apart from what the user says, an assistant's blocks together."""
    out: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role must be user, assistant or system, got {role!r}", param=f"{where}.role")
        blocks = _blocks(message.get("content"), f"{where}.content")
        if role == "assistant":
            said = _assistant(blocks, f"{where}.content")
            if out and out[-1]["role"] == "assistant":
                out[-1] = _joined(out[-1], said)
            else:
                out.append(said)
        else:
            out.extend(_user(role, blocks, f"{where}.content"))
    if out and out[-1]["role"] == "assistant" and not out[-1]["tool_calls"]:
        out[-1]["partial"] = True
    return out


def _blocks(content: object, where: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{where} must be a text or a list of blocks", param=where)
    return content


def _user(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Blocks in order: tool results as messages of their own, the rest between them as what `role` says."""
    parts: list[dict[str, Any]] = []
    answered = False
    for i, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{where}[{i}]"))
            continue
        answered = True
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        content = block.get("content")
        inner = [] if content is None else _blocks(content, f"{where}[{i}].content")
        result = [_part(part, f"{where}[{i}].content[{k}]") for k, part in enumerate(inner)]
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    if parts or not answered:
        yield {"role": role, "content": parts}


def _part(block: object, where: str) -> dict[str, Any]:
    """A text block, or an image as a chat's part."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(block, Mapping) and kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if isinstance(block, Mapping) else None
    if kind == "image" and isinstance(source, Mapping):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RequestError(f"{where} is a block of type {kind!r}, which is not supported here", param=where)


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    thinking: list[str] = []
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        kind, param = block.get("type"), f"{where}[{i}]"
        if kind == "thinking":
            thinking.append(str(block.get("thinking") or unseal(block.get("signature"))))
        elif kind == "tool_use":
            calls.append(_call(block, param))
        elif kind != "redacted_thinking":  # another model's, and closed to everybody else
            text.append(_text(block, param))
    return {
        "role": "assistant",
        "content": "".join(text),
        "reasoning_content": "".join(thinking),
        "tool_calls": calls,
    }


def _text(block: Mapping[str, Any], where: str) -> str:
    part = _part(block, where)
    if "text" not in part:
        raise RequestError(f"{where}: an assistant's message has no images", param=where)
    return part["text"]


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}.input must be an object", param=f"{where}.input")
    raw = given.get(RAW_INPUT) if set(given) == {RAW_INPUT} else None
    arguments = raw if isinstance(raw, str) else given
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages of the assistant in a row are one turn."""
    fields = ("content", "reasoning_content", "tool_calls")
    return {"role": "assistant"} | {name: first[name] + second[name] for name in fields}


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
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool["input_schema"]}
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
