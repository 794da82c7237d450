"""A chat request body as a K3 prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from k3hal.errors import RequestError
from k3hal.serve import notes
from k3hal.serve.history import Message, prefill_text, read_messages, render_messages, render_prefill
from k3hal.serve.media.images import Image, Images, Media, NoMedia
from k3hal.serve.response_format import ResponseFormat, read_format
from k3hal.serve.thinking import Thinking, ThinkingDefaults, read_thinking
from k3hal.serve.tool_checks import ToolSetup, read_tools
from k3hal.serve.xtml import Segment, encode, open_tag, to_text
from k3hal.tokenizer import Tokenizer

Channel = Literal["reasoning", "content"]

RENDER_FIELDS = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "thinking",
    "thinking_effort", "reasoning_effort", "enable_thinking", "chat_template_kwargs",
)  # fmt: skip
"""The fields of a request that shape its prompt, or what may be answered to it."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered request. The model's output begins inside `channel`; `prefill` is what the answer says already.

    The pad tokens in `segments` stand for `images`, in order.
    """

    segments: tuple[Segment, ...]
    channel: Channel
    tools: ToolSetup
    response_format: ResponseFormat
    prefill: str = ""
    images: tuple[Image, ...] = ()

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        return encode(self.segments, tokenizer)

    @property
    def constrained_by(self) -> str:
        """The field of the request that says what may be answered, if one does."""
        return "tools" if self.response_format.kind == "text" else self.response_format.param

    def text(self) -> str:
        return to_text(self.segments)


def render_chat(
    body: Mapping[str, Any], defaults: ThinkingDefaults | None = None, *, images: Images | None = None
) -> ChatPrompt:
    """Render the body of a chat completion request; its images go to `images`, without which they are refused.

    Raises `RequestError` naming the field that is wrong.
    """
    try:
        return _render(body, defaults or ThinkingDefaults(), images or NoMedia())
    except RecursionError:
        raise RequestError("the request is nested too deep to render") from None


def _render(body: Mapping[str, Any], defaults: ThinkingDefaults, media: Images | NoMedia) -> ChatPrompt:
    messages = read_messages(body.get("messages"))
    thinking = read_thinking(body, defaults)
    tools = read_tools(body, messages)
    answer = read_format(body)
    prefill = _prefill(messages)
    segments = tuple(_segments(messages, prefill, thinking, tools, answer, media))
    in_response = prefill is not None or not thinking.enabled
    return ChatPrompt(
        segments,
        "content" if in_response else "reasoning",
        tools,
        answer,
        prefill="" if prefill is None else prefill_text(prefill, f"messages[{len(messages) - 1}]"),
        images=tuple(media.found) if isinstance(media, Images) else (),
    )


def _segments(
    messages: Sequence[Message],
    prefill: Message | None,
    thinking: Thinking,
    tools: ToolSetup,
    answer: ResponseFormat,
    media: Media,
) -> Iterator[Segment]:
    if tools.declared:
        yield from notes.tool_declaration(tools.declared)
    if thinking.enabled and thinking.effort is not None:
        yield from notes.thinking_effort(thinking.effort)
    yield from render_messages(messages if prefill is None else messages[:-1], thinking.enabled, media)
    yield from notes.tool_choice(tools.choice)
    yield from notes.response_format(answer.kind, answer.noted_schema)
    if prefill is not None:
        yield from render_prefill(prefill, thinking.enabled, f"messages[{len(messages) - 1}]")
    else:
        yield from open_tag("message", ("role", "assistant"))
        yield from open_tag("think" if thinking.enabled else "response")


def _prefill(messages: Sequence[Message]) -> Message | None:
    """The last message if it is marked `partial`, that is, to be continued by the model."""
    for i, item in enumerate(messages):
        partial = item.get("partial")
        if not isinstance(partial, (bool, type(None))):
            raise RequestError(f"messages[{i}].partial must be true or false", param=f"messages[{i}].partial")
        if not partial:
            continue
        if i != len(messages) - 1 or item["role"] != "assistant" or item.get("tool_calls"):
            raise RequestError(
                f"messages[{i}].partial is only allowed on a last assistant message without tool calls",
                param=f"messages[{i}].partial",
            )
        return item
    return None
