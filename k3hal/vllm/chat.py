"""A chat as vLLM hands it on, rendered by K3HAL's own renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3hal.errors import RequestError
from k3hal.serve.chat_prompt import ChatPrompt, render_chat
from k3hal.serve.thinking import TEMPLATE_FIELDS


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`template` are the template arguments of vLLM's `ChatParams`; tools, choice and format may be pydantic models."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    response_format: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)


def render(request: ChatRequest) -> ChatPrompt:
    """The prompt. Raises `RequestError` naming the field that is wrong, or that K3 has no use for."""
    template = request.template
    if template.get("chat_template") is not None:
        raise RequestError("K3 has no chat template: its markup is fixed", param="chat_template")
    messages = [_plain(message) for message in request.messages]
    if template.get("continue_final_message"):
        messages[-1:] = [{**message, "partial": True} for message in messages[-1:]]
    elif template.get("add_generation_prompt") is False:
        raise RequestError("add_generation_prompt must be true", param="add_generation_prompt")
    body = {
        "messages": messages,
        "tools": None if request.tools is None else [_tool(tool) for tool in request.tools],
        "tool_choice": _plain(request.tool_choice),
        "response_format": _plain(request.response_format),
        "chat_template_kwargs": {name: template[name] for name in TEMPLATE_FIELDS if name in template},
        "reasoning_effort": template.get("reasoning_effort"),
    }
    return render_chat(body)


def _tool(tool: Any) -> Any:
    """vLLM writes the fields of a function that were not given as null; K3 sees a tool as the client wrote it."""
    plain = _plain(tool)
    if not isinstance(plain, Mapping) or not isinstance(plain.get("function"), Mapping):
        return plain
    return {**plain, "function": {name: value for name, value in plain["function"].items() if value is not None}}


def _plain(value: Any) -> Any:
    """JSON values of pydantic models, which vLLM's requests are made of."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", by_alias=True, exclude_none=True) if callable(dump) else value
