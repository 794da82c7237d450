"""Items of the responses API as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3hal.errors import RequestError
from k3hal.serve.opaque import unseal
from k3hal.serve.responses.tools import INPUT, spaced

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class Conversation:
    """Items read into `out`; what the model wrote in one turn, thinking, text and calls, is one message.

    `names` maps what an error about `out` calls a field, such as `messages[2].tool_call_id`, to what the request does.
    """

    def __init__(self, instructions: str | None) -> None:
        self.out: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
        self.names: dict[str, str] = {"messages[0]": "instructions"} if instructions else {}

    def read(self, item: Mapping[str, Any], where: str) -> None:
        """Append what an item says. Raises `RequestError` naming what is wrong in it, within `where`."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            turn, _ = self._turn("reasoning_content", where)
            turn["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            self._call(item, item.get("arguments"), where, "arguments")
        elif kind == "custom_tool_call":
            self._call(item, {INPUT: item.get("input")}, where, "input")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output"), f"{where}.output")
            name = self._add({"role": "tool", "tool_call_id": item.get("call_id"), "content": output}, where)
            self.names[f"{name}.tool_call_id"] = f"{where}.call_id"
            self.names[f"{name}.content"] = f"{where}.output"
        elif kind == "message" and item.get("role") == "assistant":
            turn, name = self._turn("content", where)
            turn["content"] = _content(item.get("content"), f"{where}.content")
            self.names[f"{name}.content"] = f"{where}.content"
        elif kind == "message":
            self._add({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}, where)
        else:
            raise RequestError(f"{where} is an item of type {kind!r:.100}, which is not supported", param=where)

    def _add(self, message: dict[str, Any], where: str) -> str:
        """Append a message that comes from `where`; what it is called in the chat."""
        name = f"messages[{len(self.out)}]"
        self.out.append(message)
        self.names[name] = where
        return name

    def _turn(self, field: str, where: str) -> tuple[dict[str, Any], str]:
        """The assistant's message that takes `field` next: thinking comes first, then text, then calls."""
        order = ("reasoning_content", "content", "tool_calls")
        if self.out and self.out[-1]["role"] == "assistant":
            last = self.out[-1]
            filled = [name for name in order if last[name]]
            if not filled or order.index(field) > order.index(filled[-1]) or field == filled[-1] == "tool_calls":
                return last, f"messages[{len(self.out) - 1}]"
        name = self._add({"role": "assistant", "reasoning_content": "", "content": "", "tool_calls": []}, where)
        return self.out[-1], name

    def _call(self, item: Mapping[str, Any], arguments: object, where: str, own: str) -> None:
        turn, name = self._turn("tool_calls", where)
        part = f"{name}.tool_calls[{len(turn['tool_calls'])}].function"
        self.names[f"{part}.name"] = f"{where}.name"
        self.names[f"{part}.arguments"] = f"{where}.{own}"
        function = {"name": spaced(item.get("namespace"), item.get("name")), "arguments": arguments}
        turn["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The thinking in the open, or else the one that `include` had asked to be sealed."""
    content = item.get("content")
    parts = [] if content is None else _content(content, f"{where}.content")
    text = parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)
    return text or unseal(item.get("encrypted_content"))


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
