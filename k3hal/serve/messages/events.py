"""An answer in the form of Anthropic's messages, whole or as a stream of events."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import orjson

from k3hal.serve.blank_lead import BlankLead
from k3hal.serve.chat_choice import ChatMessage, Delta
from k3hal.serve.http_io import named_event
from k3hal.serve.messages.conversation import RAW_INPUT
from k3hal.serve.opaque import seal
from k3hal.serve.turn import ChatTurn


class MessageAnswer:
    """One turn's answer. With `hidden`, thinking travels in its block's signature only."""

    def __init__(self, turn: ChatTurn, *, hidden: bool) -> None:
        self._turn = turn
        self._hidden = hidden
        self._choice = turn.choices[0]
        self._lead = BlankLead()
        self._index = -1
        self._open = ""
        self._thinking: list[str] = []

    async def whole(self) -> dict[str, Any]:
        message = ChatMessage()
        async for step in self._turn.run.steps():
            message.add(step.delta)
        said = message.fields(self._choice.complete_calls)
        content: list[dict[str, Any]] = []
        if said.get("reasoning_content"):
            text = said["reasoning_content"]
            shown = "" if self._hidden else text
            content.append({"type": "thinking", "thinking": shown, "signature": self._signature(text)})
        if said["content"]:
            content.append({"type": "text", "text": said["content"]})
        content.extend(_tool_use(call) for call in said.get("tool_calls", ()))
        return self._head() | {"content": content, "usage": self._usage()} | self._end()

    async def events(self) -> AsyncIterator[bytes]:
        begun = False
        async for step in self._turn.run.steps():
            if not begun:
                begun = True
                yield _event("message_start", message=self._head() | {"content": [], "usage": self._usage()})
            for delta in self._lead.feed(step.delta):
                for part in self._delta(delta):
                    yield part
        for delta in self._lead.flush():
            for part in self._delta(delta):
                yield part
        for part in self._close():
            yield part
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        if delta.name == "tool_calls":
            yield from self._call(delta.value)
        elif delta.name == "content":
            if self._open != "text":
                yield from self._start("text", {"type": "text", "text": ""})
            if delta.value:
                yield self._grow({"type": "text_delta", "text": delta.value})
        else:
            if self._open != "thinking":
                yield from self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(delta.value)
            if not self._hidden:
                yield self._grow({"type": "thinking_delta", "thinking": delta.value})

    def _call(self, call: dict[str, Any]) -> Iterator[bytes]:
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._start("tool_use", block)
        if call["function"]["arguments"]:
            yield self._grow({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def _start(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close()
        self._index += 1
        self._open = kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._grow({"type": "signature_delta", "signature": self._signature("".join(self._thinking))})
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _grow(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _signature(self, text: str) -> str:
        """Never empty: clients drop thinking that is not signed."""
        return seal(text) if self._hidden else "sha256." + hashlib.sha256(text.encode()).hexdigest()

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._turn.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _end(self) -> dict[str, Any]:
        choice, limit = self._choice, self._turn.params.max_tokens
        matched = choice.stop_reason if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str) else None
        reasons = {
            "stop": "end_turn" if matched is None else "stop_sequence",
            "tool_calls": "tool_use",
            "length": "max_tokens" if len(choice.token_ids) == limit else "model_context_window_exceeded",
        }
        return {"stop_reason": reasons[choice.finish_reason or "stop"], "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.run.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """A call as a block. Arguments that are no JSON object stand whole under a key of their own."""
    text = call["function"]["arguments"]
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError:
        given = None
    block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
    return block | {"input": given if isinstance(given, dict) else {RAW_INPUT: text}}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
