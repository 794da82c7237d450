"""The items of an answer while they grow, and the events that tell of it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import orjson

from k3hal.serve.opaque import seal
from k3hal.serve.responses.tools import INPUT

Event = tuple[str, dict[str, Any]]
"""An event's type and its own fields; its place in the answer is added by whoever sends it."""


class Output(Protocol):
    """One item of an answer."""

    def begin(self) -> Iterator[Event]: ...

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]: ...

    def end(self, status: str) -> Iterator[Event]:
        """Complete the item; from then on `item` is what it stays."""
        ...

    def item(self) -> dict[str, Any]: ...


class _Text(ABC):
    """An item of one part of text."""

    prefix: str
    event: str

    def __init__(self) -> None:
        self._id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._status = "in_progress"

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"item": self.item()}
        yield "response.content_part.added", self._at() | {"part": self._part("")}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        yield f"response.{self.event}.delta", self._at() | {"delta": text} | self._extra(logprobs)

    def end(self, status: str) -> Iterator[Event]:
        self._status = status
        text = self._text()
        yield f"response.{self.event}.done", self._at() | {"text": text} | self._extra(self._logprobs)
        yield "response.content_part.done", self._at() | {"part": self._part(text)}
        yield "response.output_item.done", {"item": self.item()}

    @abstractmethod
    def item(self) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]: ...

    def _extra(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {}

    def _text(self) -> str:
        return "".join(self._texts)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0}

    def _content(self) -> list[dict[str, Any]]:
        return [] if self._status == "in_progress" else [self._part(self._text())]


class Reasoning(_Text):
    """The model's thinking, `sealed` a second time for clients that keep no other form of it."""

    prefix, event = "rs", "reasoning_text"

    def __init__(self, *, sealed: bool) -> None:
        super().__init__()
        self._sealed = sealed

    def item(self) -> dict[str, Any]:
        item = {"id": self._id, "type": "reasoning", "summary": [], "content": self._content(), "status": self._status}
        if self._sealed and self._status != "in_progress":
            item["encrypted_content"] = seal(self._text())
        return item

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class Message(_Text):
    """What the model says."""

    prefix, event = "msg", "output_text"

    def item(self) -> dict[str, Any]:
        fields = {"role": "assistant", "content": self._content(), "status": self._status}
        return {"id": self._id, "type": "message", **fields}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _extra(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": list(logprobs)}


class Call:
    """A call of a function, which may be in a namespace."""

    def __init__(self, call_id: str, namespace: str | None, name: str) -> None:
        self._space = {} if namespace is None else {"namespace": namespace}
        self._id = f"fc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []
        self._status = "in_progress"

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"item": self.item()}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        self._arguments.append(text)
        yield "response.function_call_arguments.delta", {"item_id": self._id, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        self._status = status
        fields = {"item_id": self._id, "name": self._name, "arguments": "".join(self._arguments)}
        yield "response.function_call_arguments.done", fields
        yield "response.output_item.done", {"item": self.item()}

    def item(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": self._status,
            **self._space,
        }


class CustomCall:
    """A call of a custom tool. Its text comes whole, since what the model writes is a JSON object around it."""

    def __init__(self, call_id: str, namespace: str | None, name: str) -> None:
        self._space = {} if namespace is None else {"namespace": namespace}
        self._id = f"ctc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []
        self._status = "in_progress"

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"item": self.item() | {"input": ""}}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        self._arguments.append(text)
        return iter(())

    def end(self, status: str) -> Iterator[Event]:
        self._status = status
        item = self.item()
        yield "response.custom_tool_call_input.delta", {"item_id": self._id, "delta": item["input"]}
        yield "response.custom_tool_call_input.done", {"item_id": self._id, "input": item["input"]}
        yield "response.output_item.done", {"item": item}

    def item(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "custom_tool_call",
            "call_id": self._call_id,
            "name": self._name,
            "input": _input("".join(self._arguments)),
            "status": self._status,
            **self._space,
        }


def _input(arguments: str) -> str:
    """The text for a custom tool; arguments in any other form are it as they are."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) and set(value) == {INPUT} else None
    return text if isinstance(text, str) else arguments
