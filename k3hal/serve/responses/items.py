"""Items of the responses API as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3hal.errors import RequestError
from k3hal.serve.opaque import unseal
from k3hal.serve.responses.tools import INPUT, spaced

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages that `items` make. What the model wrote in one turn, thinking, text and calls, is one message.

    Raises `RequestError` naming the item that is wrong.
    """
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            _said(messages, "reasoning_content")["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            _said(messages, "tool_calls")["tool_calls"].append(_call(item))
        elif kind == "custom_tool_call":
            _said(messages, "tool_calls")["tool_calls"].append(_call({**item, "arguments": {INPUT: item.get("input")}}))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "message" and item.get("role") == "assistant":
            _said(messages, "content")["content"] = _content(item.get("content"), f"{where}.content")
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
        else:
            raise RequestError(f"{where} is an item of type {kind!r:.100}, which is not supported", param=where)
    return messages


def _said(messages: list[dict[str, Any]], field: str) -> dict[str, Any]:
    """The assistant's message that takes `field` next: thinking comes first, then text, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        filled = [name for name in order if last[name]]
        if not filled or order.index(field) > order.index(filled[-1]) or field == filled[-1] == "tool_calls":
            return last
    messages.append({"role": "assistant", "reasoning_content": "", "content": "", "tool_calls": []})
    return messages[-1]


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The thinking in the open, or else the one that `include` had asked to be sealed."""
    content = item.get("content")
    parts = [] if content is None else _content(content, f"{where}.content")
    text = parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)
    return text or unseal(item.get("encrypted_content"))


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": spaced(item.get("namespace"), item.get("name")), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _content(content: object, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts", param=where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, Mapping) and kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if isinstance(part, Mapping) and kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    raise RequestError(f"{where} is a part of type {kind!r:.100}, which is not supported", param=where)
