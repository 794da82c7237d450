"""The messages of a conversation as XTML segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3hal.errors import RequestError
from k3hal.serve import notes
from k3hal.serve.images import Media, NoMedia
from k3hal.serve.tool_arguments import render_arguments
from k3hal.serve.xtml import Attributes, Segment, close_tag, element, message, open_tag

Message = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool")


def read_messages(value: object) -> list[Message]:
    """The request's messages with roles checked and `developer` taken as `system`."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a non-empty list", param="messages")
    result: list[Message] = []
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RequestError(f"messages[{i}] must be an object", param=f"messages[{i}]")
        role = item.get("role")
        role = "system" if role == "developer" else role
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(
                f"messages[{i}].role must be system, developer, user, assistant or tool, got {role!r:.100}",
                param=f"messages[{i}].role",
            )
        result.append({**item, "role": role})
    return result


def render_messages(messages: Sequence[Message], thinking: bool, media: Media) -> Iterator[Segment]:
    """Segments of every message in order; runs of tool results come out in the order of the calls they answer."""
    calls: list[Message] = []
    answered = 0
    at = 0
    while at < len(messages):
        role, param = messages[at]["role"], f"messages[{at}]"
        if role == "tool":
            end = at
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            yield from _tool_results(messages[at:end], calls, answered, at, media)
            answered += end - at
            at = end
            continue
        if role == "assistant":
            calls, answered = _tool_calls(messages[at], param), 0
            body = _assistant_body(messages[at], calls, thinking, param, media)
            yield from message(_head(messages[at], param), body)
        else:
            yield from _plain(messages[at], param, media)
        at += 1


def render_prefill(item: Message, thinking: bool, param: str) -> Iterator[Segment]:
    """The start of an assistant message that the model continues: its channels up to an open response."""
    _no_tools(item, param)
    yield from open_tag("message", *_head(item, param))
    if thinking:
        yield from element("think", _reasoning(item, param))
    yield from open_tag("response")
    yield Segment(prefill_text(item, param))


def prefill_text(item: Message, param: str) -> str:
    """What the answer to be continued says so far. Raises `RequestError` when that is not text alone."""
    return "".join(segment.text for segment in _content(item, param, NoMedia("an answer to be continued is text")))


def _plain(item: Message, param: str, media: Media) -> Iterator[Segment]:
    tools = item.get("tools")
    if tools:
        if item["role"] != "system":
            _no_tools(item, param)
        if item.get("content"):
            raise RequestError(f"{param} declares tools, so its content must be empty", param=f"{param}.content")
        return notes.dynamic_tools(tools)
    if item.get("content") is None:
        raise RequestError(f"{param}.content is missing", param=f"{param}.content")
    return message(_head(item, param), _content(item, param, media))


def _no_tools(item: Message, param: str) -> None:
    if item.get("tools"):
        raise RequestError(f"{param}.tools is only allowed in a system message", param=f"{param}.tools")


def _assistant_body(
    item: Message, calls: Sequence[Message], thinking: bool, param: str, media: Media
) -> Iterator[Segment]:
    _no_tools(item, param)
    if thinking:
        yield from element("think", _reasoning(item, param))
    yield from open_tag("response")
    yield from _content(item, param, media)
    yield from close_tag("response")
    if calls:
        yield from open_tag("tools")
        for index, call in enumerate(calls, start=1):
            function = call["function"]
            where = f"{param}.tool_calls[{index - 1}].function.arguments"
            yield from open_tag("call", ("tool", function["name"]), ("index", str(index)))
            yield from render_arguments(function.get("arguments"), where)
            yield from close_tag("call")
        yield from close_tag("tools")


def _reasoning(item: Message, param: str) -> str:
    text = item.get("reasoning_content") or item.get("reasoning") or ""
    if not isinstance(text, str):
        raise RequestError(f"{param}.reasoning_content must be a string", param=f"{param}.reasoning_content")
    return text if text.strip() else ""


def _tool_calls(item: Message, param: str) -> list[Message]:
    calls = item.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(f"{param}.tool_calls must be a list", param=f"{param}.tool_calls")
    for i, call in enumerate(calls):
        where = f"{param}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
    return calls


def _tool_results(
    run: Sequence[Message], calls: Sequence[Message], answered: int, first: int, media: Media
) -> Iterator[Segment]:
    """A maximal run of tool messages: in call order when every one matches a call, else as received."""
    position: dict[str, int] = {}
    for i, call in enumerate(calls):
        if isinstance(call.get("id"), str):
            position.setdefault(call["id"], i)
    for i, item in enumerate(run):
        _no_tools(item, f"messages[{first + i}]")
        if not isinstance(item.get("tool_call_id"), str):
            where = f"messages[{first + i}].tool_call_id"
            raise RequestError(f"{where} must be the id of the call it answers", param=where)
    order = list(range(len(run)))
    matched = all(item["tool_call_id"] in position for item in run)
    if matched:
        order.sort(key=lambda i: position[run[i]["tool_call_id"]])
    for offset, i in enumerate(order):
        item, param = run[i], f"messages[{first + i}]"
        if matched:
            name = calls[position[item["tool_call_id"]]]["function"]["name"]
        else:
            name = _result_name(item, calls, answered + offset, param)
        head = (("role", "tool"), ("tool", name), ("index", str(answered + offset + 1)))
        yield from message(head, _content(item, param, media))


def _result_name(item: Message, calls: Sequence[Message], position: int, param: str) -> str:
    name = item.get("name") or item.get("tool")
    if isinstance(name, str):
        return name
    if position < len(calls):
        return calls[position]["function"]["name"]
    where = f"{param}.tool_call_id"
    raise RequestError(f"{where} is the id of no call in the conversation, and the message has no name", param=where)


def _head(item: Message, param: str) -> Attributes:
    name = item.get("name")
    if name is None or name == "":
        return (("role", item["role"]),)
    if not isinstance(name, str):
        raise RequestError(f"{param}.name must be a string", param=f"{param}.name")
    return (("role", item["role"]), ("name", name))


def _content(item: Message, param: str, media: Media) -> list[Segment]:
    """The message's content: a string, or parts, of which neighbouring texts become one; null is empty."""
    content = item.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [Segment(content)]
    if not isinstance(content, list):
        raise RequestError(f"{param}.content must be a string or a list of parts", param=f"{param}.content")
    segments: list[Segment] = []
    for i, part in enumerate(content):
        for segment in _part(part, f"{param}.content[{i}]", media):
            if segments and not segment.markup and not segments[-1].markup:
                segments[-1] = Segment(segments[-1].text + segment.text)
            else:
                segments.append(segment)
    return segments


def _part(part: object, param: str, media: Media) -> list[Segment]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return [Segment(part["text"])]
    if isinstance(part, Mapping) and kind in ("image_url", "image"):
        return media.segments(part, param)
    raise RequestError(f'{param} must be {{"type": "text", "text": …}}, got a part of type {kind!r:.100}', param=param)
