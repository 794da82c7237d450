"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3hal.engine.interface import TokenLogprob
from k3hal.errors import RequestError
from k3hal.serve.generate import Run, Step, with_keep_alive
from k3hal.serve.http_errors import json_response
from k3hal.serve.http_io import DONE, KEEP_ALIVE, EventStream, connected, event
from k3hal.serve.logprobs import text_logprobs
from k3hal.serve.reading import beside, read_checked
from k3hal.serve.request_info import RequestInfo, info_of
from k3hal.serve.requests import CompletionRequest, Prompt, check_ids, check_prompt
from k3hal.serve.state import ServerState, new_id
from k3hal.serve.text_choice import TextChoice, TextDelta
from k3hal.tokenizer import Tokenizer

MAX_PROMPTS = 128


async def completions(state: ServerState, request: Request) -> Response:
    _, asked = await read_checked(state, request, CompletionRequest)
    model = state.model_name(asked.model)
    info = state.engine.info
    params = asked.params(state.config.generation_defaults, info.vocab_size)
    prompts = await _prompts(asked, state.tokenizer, info_of(request))
    for ids in prompts:
        check_prompt(ids, info.vocab_size, info.max_model_len, "prompt")
        if asked.echo:  # a model's vocabulary may be larger than its tokenizer's
            check_ids(ids, state.tokenizer.vocab_size, "prompt")
    echoes = [state.tokenizer.decode(ids) if asked.echo else "" for ids in prompts for _ in range(params.n)]
    request_info = info_of(request)
    request_info.facts["model"] = model
    if state.config.log_prompts:
        request_info.prompt = "\n".join(map(state.tokenizer.decode, prompts))
    answer_id = new_id("cmpl-", asked.request_id)
    generation = state.submit(answer_id, prompts, params, asked.priority, asked.cache_salt)
    choices = [TextChoice(state.tokenizer, params) for _ in range(len(prompts) * params.n)]
    run = Run(generation, choices, prompts, params, state.metrics, info_of(request), state.config.request_timeout)
    answer = _TextAnswer(state, asked, answer_id, model, run, choices, echoes)
    if asked.stream:
        return EventStream(with_keep_alive(answer.events(), state.config.keep_alive, KEEP_ALIVE), run)
    async with connected(request.receive, run):
        return json_response(await answer.whole())


async def _prompts(asked: CompletionRequest, tokenizer: Tokenizer, info: RequestInfo) -> list[list[int]]:
    """The prompts as token ids, of each no more than the last `truncate_prompt_tokens`."""
    prompts = await beside(info, _encoded, asked.prompt, tokenizer)
    keep = asked.truncate_prompt_tokens
    return prompts if keep is None else [ids[-keep:] for ids in prompts]


def _encoded(prompt: Prompt, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as token ids: one or several, as text or as ids."""
    if isinstance(prompt, str):
        return [tokenizer.encode_ordinary(prompt)]
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"at most {MAX_PROMPTS} prompts a request, got {len(prompt)}", param="prompt")
    return [tokenizer.encode_ordinary(p) if isinstance(p, str) else p for p in prompt if not isinstance(p, int)]


class _TextAnswer:
    """One answer's response, streamed or whole."""

    def __init__(
        self,
        state: ServerState,
        asked: CompletionRequest,
        answer_id: str,
        model: str,
        run: Run[TextDelta],
        choices: Sequence[TextChoice],
        echoes: Sequence[str],
    ) -> None:
        self._tokenizer = state.tokenizer
        self._asked = asked
        self._run = run
        self._choices = choices
        self._echoes = echoes
        self._offsets = [0] * len(choices)
        self._head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        texts = [[echo] for echo in self._echoes]
        logprobs: list[list[TokenLogprob]] = [[] for _ in self._choices]
        async for step in self._run.steps():
            texts[step.choice].append(step.delta.text)
            logprobs[step.choice].extend(step.delta.logprobs)
        choices = [
            self._choice(i, "".join(texts[i]), logprobs[i], choice.token_ids) for i, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": self._run.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        options = self._asked.stream_options
        include_usage = options is not None and options.include_usage
        continuous = include_usage and options is not None and options.continuous_usage_stats
        started: set[int] = set()
        async for step in self._run.steps():
            choice = self._step_choice(step, first=step.choice not in started)
            if choice is None:
                continue
            started.add(step.choice)
            chunk = {**self._head, "choices": [choice]}
            if include_usage:
                chunk["usage"] = self._run.usage() if continuous else None
            yield event(chunk)
        if include_usage:
            yield event({**self._head, "choices": [], "usage": self._run.usage()})
        yield DONE

    def _step_choice(self, step: Step[TextDelta], *, first: bool) -> dict[str, Any] | None:
        """The choice of one chunk, or None where a step has nothing to show yet."""
        text, logprobs = step.delta
        if first:
            text = self._echoes[step.choice] + text
        finished = self._choices[step.choice].finish_reason is not None
        if not (text or logprobs or finished or self._asked.return_token_ids):
            return None
        return self._choice(step.choice, text, logprobs, step.new_ids)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], token_ids: Sequence[int]
    ) -> dict[str, Any]:
        state = self._choices[index]
        shown = None
        if self._asked.logprobs is not None:
            shown = text_logprobs(logprobs, self._tokenizer, self._offsets[index])
        self._offsets[index] += len(text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice
