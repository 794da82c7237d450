"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from k3hal.errors import RequestError
from k3hal.serve.chat_choice import ChatChoice, ChatMessage, Delta
from k3hal.serve.chat_prompt import ChatPrompt, render_chat
from k3hal.serve.generate import Run, Step, with_keep_alive
from k3hal.serve.http_errors import json_response
from k3hal.serve.http_io import DONE, KEEP_ALIVE, EventStream, connected, read_json
from k3hal.serve.logprobs import chat_logprobs
from k3hal.serve.requests import ChatRequest, check_prompt, read_request
from k3hal.serve.state import ServerState, new_id


async def chat_completions(state: ServerState, request: Request) -> Response:
    body = await read_json(request, state.config.max_body_bytes)
    asked = read_request(ChatRequest, body)
    model = state.model_name(asked.model)
    info = state.engine.info
    params = asked.params(state.config.generation_defaults, info.vocab_size)
    prompt = render_chat(body, state.config.thinking)
    _check_enforceable(prompt)
    ids = prompt.ids(state.tokenizer)
    check_prompt(ids, info.vocab_size, info.max_model_len)
    answer_id = new_id("chatcmpl", asked.request_id)
    generation = state.submit(answer_id, [ids], params, asked.priority, asked.cache_salt)
    reasoning = asked.include_reasoning is not False
    choices = [ChatChoice(state.tokenizer, prompt, params, reasoning=reasoning) for _ in range(params.n)]
    run = Run(generation, choices, [ids], params, state.metrics)
    answer = _ChatAnswer(state, asked, answer_id, model, run, choices)
    if asked.stream:
        return EventStream(with_keep_alive(answer.events(), state.config.keep_alive, KEEP_ALIVE), run)
    async with connected(request.receive, run):
        return json_response(await answer.whole())


def _check_enforceable(prompt: ChatPrompt) -> None:
    if prompt.tools.choice == "named":
        raise RequestError(
            f"tool_choice cannot force the call of {prompt.tools.allowed[0]!r}: constrained output is not available",
            hint="use auto, required or none",
            param="tool_choice",
        )


class _ChatAnswer:
    """One answer's response, streamed or whole."""

    def __init__(
        self,
        state: ServerState,
        asked: ChatRequest,
        answer_id: str,
        model: str,
        run: Run[list[Delta]],
        choices: list[ChatChoice],
    ) -> None:
        self._run = run
        self._state = state
        self._asked = asked
        self._choices = choices
        self._head = {"id": answer_id, "object": "chat.completion", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        messages = [ChatMessage() for _ in self._choices]
        async for step in self._run.steps():
            messages[step.choice].add(step.delta)
        self._count_recoveries()
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
            if step.choice not in started:
                started.add(step.choice)
                yield chunk(_chunk_choice(step.choice, {"role": "assistant", "content": ""}))
            for choice in self._chunk_choices(step):
                yield chunk(choice)
        self._count_recoveries()
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

    def _count_recoveries(self) -> None:
        for choice in self._choices:
            self._state.metrics.recovered(choice.parser.recoveries.items())


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
