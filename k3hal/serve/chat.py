"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from k3hal.serve.chat_choice import ChatMessage, Delta
from k3hal.serve.generate import Step, with_keep_alive
from k3hal.serve.http_errors import json_response
from k3hal.serve.http_io import DONE, KEEP_ALIVE, EventStream, connected
from k3hal.serve.logprobs import chat_logprobs
from k3hal.serve.reading import read_checked
from k3hal.serve.request_info import info_of
from k3hal.serve.requests import ChatRequest
from k3hal.serve.state import ServerState
from k3hal.serve.turn import ChatTurn, begin_turn, render_ids


async def chat_completions(state: ServerState, request: Request) -> Response:
    body, asked = await read_checked(state, request, ChatRequest)
    turn = await begin_turn(state, asked, body, info_of(request), "chatcmpl-")
    answer = _ChatAnswer(state, asked, turn)
    if asked.stream:
        return EventStream(with_keep_alive(answer.events(), state.config.keep_alive, KEEP_ALIVE), turn.run)
    async with connected(request.receive, turn.run):
        return json_response(await answer.whole())


async def render(state: ServerState, request: Request) -> Response:
    """The prompt that the same body would become as a chat completion."""
    body, asked = await read_checked(state, request, ChatRequest)
    model = state.model_name(asked.model)
    prompt, ids = await render_ids(state, body, info_of(request))
    return json_response({"model": model, "token_ids": ids, "count": len(ids), "text": prompt.text()})


class _ChatAnswer:
    """One answer's response, streamed or whole."""

    def __init__(self, state: ServerState, asked: ChatRequest, turn: ChatTurn) -> None:
        self._run = turn.run
        self._state = state
        self._asked = asked
        self._choices = turn.choices
        self._head = {"id": turn.answer_id, "object": "chat.completion", "created": turn.created, "model": turn.model}

    async def whole(self) -> dict[str, Any]:
        messages = [ChatMessage() for _ in self._choices]
        async for step in self._run.steps():
            messages[step.choice].add(step.delta)
        choices = [self._choice(i, message) for i, message in enumerate(messages)]
        return {**self._head, "choices": choices, "usage": self._run.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        options = self._asked.stream_options
        include_usage = options is not None and options.include_usage
        continuous = include_usage and options is not None and options.continuous_usage_stats
        head = orjson.dumps({**self._head, "object": "chat.completion.chunk"})[:-1] + b',"choices":['
        prefix = b"data: " + head

        def chunk(choice: dict[str, Any] | None) -> bytes:
            usage = b""
            if choice is None or continuous:
                usage = b',"usage":' + orjson.dumps(self._run.usage())
            elif include_usage:
                usage = b',"usage":null'
            return prefix + (b"" if choice is None else orjson.dumps(choice)) + b"]" + usage + b"}\n\n"

        started: set[int] = set()
        async for step in self._run.steps():
            chunks: list[bytes] = []
            if step.choice not in started:
                started.add(step.choice)
                chunks.append(chunk(_chunk_choice(step.choice, {"role": "assistant", "content": ""})))
            chunks.extend(map(chunk, self._chunk_choices(step)))
            if chunks:
                yield b"".join(chunks)
        if include_usage:
            yield chunk(None)
        yield DONE

    def _chunk_choices(self, step: Step[list[Delta]]) -> list[dict[str, Any]]:
        """The chunks of one step: each delta, then the finish reason once there is one."""
        out: list[dict[str, Any]] = []
        for delta in step.delta:
            choice = _chunk_choice(step.choice, delta.fields())
            if delta.logprobs:
                choice["logprobs"] = chat_logprobs(delta.logprobs, self._state.tokenizer)
            out.append(choice)
        state = self._choices[step.choice]
        if state.finish_reason is not None:
            last = _chunk_choice(step.choice, {}) | {"finish_reason": state.finish_reason}
            if state.stop_reason is not None:
                last["stop_reason"] = state.stop_reason
            if self._run.complete:
                last["usage"] = self._run.usage()  # where Kimi's clients look for it
            out.append(last)
        if self._asked.return_token_ids and step.new_ids:
            if not out:
                out.append(_chunk_choice(step.choice, {}))
            out[-1]["token_ids"] = step.new_ids
        return out

    def _choice(self, index: int, message: ChatMessage) -> dict[str, Any]:
        state = self._choices[index]
        logprobs = chat_logprobs(message.logprobs, self._state.tokenizer) if self._asked.logprobs else None
        choice = {
            "index": index,
            "message": message.fields(state.complete_calls),
            "logprobs": logprobs,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = state.token_ids
        return choice


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
