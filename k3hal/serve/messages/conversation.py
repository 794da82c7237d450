"""The messages of Anthropic's API as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3hal.errors import RequestError
from k3hal.serve.opaque import unseal

RAW_INPUT = "__raw_arguments__"
"""The one key of a tool's input that stands for arguments which are no JSON object."""

# What Claude Code puts before its system prompt: a note about the client, another one each time.
_BILLING = "x-anthropic-billing-header:"

Block = Mapping[str, Any]


class Conversation:
    """A system prompt and messages, read into `out`: tool results apart from what the user says, a turn together.

    `names` maps what an error about `out` calls a field, such as `messages[2].tool_call_id`, to what the request does.
    """

    def __init__(self, system: str | Sequence[Any] | None, messages: Sequence[Any]) -> None:
        """Raises `RequestError` naming the block that is wrong."""
        self.out: list[dict[str, Any]] = _system(system)
        self.names: dict[str, str] = {}
        for i, message in enumerate(messages):
            self._read(message, f"messages[{i}]")
        if self.out and self.out[-1]["role"] == "assistant" and not self.out[-1]["tool_calls"]:
            self.out[-1]["partial"] = True

    def _read(self, message: object, where: str) -> None:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{where}.role must be user, assistant or system, got {role!r:.100}", param=f"{where}.role"
            )
        blocks = _blocks(message.get("content"), f"{where}.content")
        if role == "assistant":
            self._assistant(blocks, where)
        else:
            self._user(role, blocks, where)

    def _add(self, message: dict[str, Any], where: str) -> str:
        """Append a message that comes from `where`; what it is called in the chat."""
        name = f"messages[{len(self.out)}]"
        self.out.append(message)
        self.names[name] = where
        return name

    def _user(self, role: str, blocks: Sequence[Block], where: str) -> None:
        """Blocks in order: tool results as messages of their own, the rest between them as what `role` says."""
        parts: list[dict[str, Any]] = []
        places: list[str] = []
        answered = False
        for i, block in enumerate(blocks):
            place = f"{where}.content[{i}]"
            if block.get("type") != "tool_result":
                parts.append(_part(block, place))
                places.append(place)
                continue
            answered = True
            if parts:
                self._said(role, parts, places, where)
                parts, places = [], []
            self._result(block, place)
        if parts or not answered:
            self._said(role, parts, places, where)

    def _said(self, role: str, parts: list[dict[str, Any]], places: Sequence[str], where: str) -> None:
        name = self._add({"role": role, "content": parts}, where)
        self.names |= {f"{name}.content[{i}]": place for i, place in enumerate(places)}

    def _result(self, block: Block, where: str) -> None:
        content = block.get("content")
        inner = [] if content is None else _blocks(content, f"{where}.content")
        result = [_part(part, f"{where}.content[{k}]") for k, part in enumerate(inner)]
        name = self._add({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}, where)
        self.names[f"{name}.tool_call_id"] = f"{where}.tool_use_id"

    def _assistant(self, blocks: Sequence[Block], where: str) -> None:
        """Messages of the assistant in a row are one turn."""
        if not self.out or self.out[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}, where)
        turn = self.out[-1]
        for i, block in enumerate(blocks):
            kind, place = block.get("type"), f"{where}.content[{i}]"
            if kind == "thinking":
                turn["reasoning_content"] += str(block.get("thinking") or unseal(block.get("signature")))
            elif kind == "tool_use":
                name = f"messages[{len(self.out) - 1}].tool_calls[{len(turn['tool_calls'])}]"
                self.names[f"{name}.function.arguments"] = f"{place}.input"
                turn["tool_calls"].append(_call(block, place))
            elif kind != "redacted_thinking":  # another model's, and closed to everybody else
                turn["content"] += _text(block, place, "an assistant's message")


def _system(system: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    texts = [_text(block, f"system[{i}]", "the system prompt") for i, block in enumerate(system)]
    parts = [{"type": "text", "text": text} for text in texts if not text.startswith(_BILLING)]
    return [{"role": "system", "content": parts}]


def _blocks(content: object, where: str) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{where} must be a text or a list of blocks", param=where)
    return content


def _part(block: object, where: str) -> dict[str, Any]:
    """A text block, or an image as a chat's part."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(block, Mapping) and kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if isinstance(block, Mapping) else None
    if kind == "image" and isinstance(source, Mapping):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RequestError(f"{where} is a block of type {kind!r:.100}, which is not supported here", param=where)


def _text(block: object, where: str, whose: str) -> str:
    part = _part(block, where)
    if "text" not in part:
        raise RequestError(f"{where}: {whose} has no images", param=where)
    return part["text"]


def _call(block: Block, where: str) -> dict[str, Any]:
    given, name = block.get("input"), block.get("name")
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}.input must be an object", param=f"{where}.input")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be a non-empty string", param=f"{where}.name")
    raw = given.get(RAW_INPUT) if set(given) == {RAW_INPUT} else None
    arguments = raw if isinstance(raw, str) else given
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}
