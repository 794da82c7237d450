"""An answer in the form of the responses API, whole or as a stream of typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from k3hal.serve.blank_lead import BlankLead
from k3hal.serve.chat_choice import Delta
from k3hal.serve.http_errors import HttpError
from k3hal.serve.http_io import named_event
from k3hal.serve.logprobs import chat_logprobs
from k3hal.serve.responses.output import Call, CustomCall, Event, Message, Output, Reasoning
from k3hal.serve.responses.request import ENCRYPTED, ResponsesRequest
from k3hal.serve.responses.tools import Toolbox
from k3hal.serve.turn import ChatTurn
from k3hal.tokenizer import Tokenizer


class ResponseAnswer:
    """One turn's answer; `finished` gets the response once it is complete."""

    def __init__(
        self,
        asked: ResponsesRequest,
        turn: ChatTurn,
        tools: Toolbox,
        tokenizer: Tokenizer,
        stored: bool,
        finished: Callable[[dict[str, Any]], None],
    ) -> None:
        self._asked = asked
        self._turn = turn
        self._choice = turn.choices[0]
        self._tools = tools
        self._tokenizer = tokenizer
        self._finished = finished
        self._sealed = ENCRYPTED in (asked.include or ())
        self._lead = BlankLead()
        self._done: list[Output] = []
        self._open: Output | None = None
        self._number = 0
        self._fixed = _echo(asked, turn) | {"store": stored}

    async def whole(self) -> dict[str, Any]:
        async for _ in self._run():
            pass
        return self._end()[1]

    async def events(self) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._response("in_progress")})
        async for kind, fields in self._run():
            yield self._event(kind, fields)
        status, response = self._end()
        yield self._event(f"response.{status}", {"response": response})

    def failed(self, error: HttpError) -> bytes:
        """The last event of a stream that fails."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failure = {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", {"response": self._response("failed") | failure})

    async def _run(self) -> AsyncIterator[Event]:
        async for step in self._turn.run.steps():
            for delta in self._lead.feed(step.delta):
                for event in self._delta(delta):
                    yield event
        for delta in self._lead.flush():
            for event in self._delta(delta):
                yield event
        for event in self._close(last=True):
            yield event

    def _delta(self, delta: Delta) -> Iterator[Event]:
        if delta.name == "tool_calls":
            if "id" in delta.value:
                yield from self._start(self._call(delta.value["id"], delta.value["function"]["name"]))
            text, logprobs = delta.value["function"]["arguments"], []
        else:
            kind = Message if delta.name == "content" else Reasoning
            if not isinstance(self._open, kind):
                yield from self._start(Message() if kind is Message else Reasoning(sealed=self._sealed))
            text = delta.value
            logprobs = chat_logprobs(delta.logprobs, self._tokenizer)["content"] if delta.logprobs else []
        if self._open is not None and (text or logprobs):
            for event in self._open.grow(text, logprobs):
                yield self._placed(event)

    def _call(self, call_id: str, name: str) -> Output:
        if name in self._tools.custom:
            return CustomCall(call_id, *self._tools.spaces.get(name, (None, name)))
        return Call(call_id, *self._tools.spaces.get(name, (None, name)))

    def _start(self, output: Output) -> Iterator[Event]:
        yield from self._close(last=False)
        self._open = output
        for event in output.begin():
            yield self._placed(event)

    def _close(self, *, last: bool) -> Iterator[Event]:
        """End the open item; the last one of an answer that was cut off is incomplete."""
        output = self._open
        if output is None:
            return
        cut = last and self._choice.finish_reason == "length"
        for event in output.end("incomplete" if cut else "completed"):
            yield self._placed(event)
        self._done.append(output)
        self._open = None

    def _placed(self, event: Event) -> Event:
        kind, fields = event
        return kind, {"output_index": len(self._done), **fields}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, value)

    def _end(self) -> tuple[str, dict[str, Any]]:
        """The final status and response. A call that was cut off is left out: nobody must run it."""
        status = "incomplete" if self._choice.finish_reason == "length" else "completed"
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        calls = [output for output in self._done if isinstance(output, Call | CustomCall)]
        dropped = calls[self._choice.complete_calls :]
        response["output"] = [output.item() for output in self._done if output not in dropped]
        response["usage"] = self._usage()
        self._finished(response)
        return status, response

    def _response(self, status: str) -> dict[str, Any]:
        return self._fixed | {"status": status, "output": [], "error": None, "incomplete_details": None, "usage": None}

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.run.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _echo(asked: ResponsesRequest, turn: ChatTurn) -> dict[str, Any]:
    """What a response says of its request."""
    params, reasoning = turn.params, asked.reasoning or {}
    return {
        "id": turn.answer_id,
        "object": "response",
        "created_at": turn.created,
        "model": turn.model,
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "max_output_tokens": asked.max_output_tokens,
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "top_logprobs": asked.top_logprobs or 0,
        "tools": asked.tools or [],
        "tool_choice": asked.tool_choice or "auto",
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": {"type": "text"}} | (asked.text or {}),
        "truncation": "disabled",
        "background": False,
        "metadata": asked.metadata or {},
        "user": asked.user,
    }
