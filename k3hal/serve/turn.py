"""Beginning to answer a chat: from a request body to a run of its choices, whichever API it came through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3hal.sampling_params import SamplingParams
from k3hal.serve.chat_choice import ChatChoice, Delta
from k3hal.serve.chat_prompt import ChatPrompt, render_chat
from k3hal.serve.fields import own_name
from k3hal.serve.generate import Run
from k3hal.serve.kimi_strict import check_hosted, fixed_sampling
from k3hal.serve.media.images import Images, placed
from k3hal.serve.reading import beside
from k3hal.serve.request_info import RequestInfo
from k3hal.serve.requests import ChatRequest, check_prompt
from k3hal.serve.state import ServerState, new_id
from k3hal.serve.thinking import read_thinking
from k3hal.tokenizer import MEDIA_PAD


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A request that is queued. Close `run` whatever happens."""

    answer_id: str
    model: str
    params: SamplingParams
    prompt: ChatPrompt
    run: Run[list[Delta]]
    choices: list[ChatChoice]
    created: int


async def begin_turn(
    state: ServerState,
    asked: ChatRequest,
    body: Mapping[str, Any],
    info: RequestInfo,
    kind: str,
    names: Mapping[str, str] | None = None,
) -> ChatTurn:
    """Render, check and queue a chat. `kind` begins the answer's id; `body` is a chat completion's.

    `names` are those that an error later on has for fields of `body`.
    """
    model = state.model_name(asked.model)
    params = _params(state, asked, body)
    prompt, ids = await render_ids(state, body, info)
    if state.config.kimi_strict_params:
        check_hosted(prompt)
    engine = state.engine.info
    check_prompt(ids, engine.vocab_size, engine.max_model_len, "messages")
    info.facts["model"] = model
    if state.config.log_prompts:
        info.prompt = prompt.text()
    constraint = await state.constraints.of(prompt)
    answer_id = new_id(kind, asked.request_id)
    images = placed(prompt.images, ids, state.tokenizer.special(MEDIA_PAD))
    generation = state.submit(answer_id, [ids], params, asked.priority, asked.cache_salt, constraint, images)
    reasoning = asked.include_reasoning is not False
    blamed = own_name(names or {}, prompt.constrained_by)
    choices = [
        ChatChoice(state.tokenizer, prompt, params, reasoning=reasoning, constrained_by=blamed) for _ in range(params.n)
    ]
    run = Run(generation, choices, [ids], params, state.metrics, info, state.config.request_timeout)
    return ChatTurn(answer_id, model, params, prompt, run, choices, int(time.time()))


async def render_ids(state: ServerState, body: Mapping[str, Any], info: RequestInfo) -> tuple[ChatPrompt, list[int]]:
    """The prompt of a chat and its token ids.

    Only a request that is right in all else makes the server fetch images, and only for an engine that takes some.
    """

    def work(images: Images | None) -> tuple[ChatPrompt, list[int]]:
        prompt = render_chat(body, state.config.thinking, images=images)
        return prompt, prompt.ids(state.tokenizer)

    if not state.engine.info.takes_images:
        return await beside(info, work, None)
    images = Images(state.config.media)
    rendered = await asyncio.to_thread(work, images)  # few bytes of an image may become many tokens
    if not images.missing:
        return rendered
    return await asyncio.to_thread(work, Images(state.config.media, await state.media.fetch(images.missing)))


def _params(state: ServerState, asked: ChatRequest, body: Mapping[str, Any]) -> SamplingParams:
    defaults = state.config.generation_defaults
    if state.config.kimi_strict_params:
        defaults = {**defaults, **fixed_sampling(asked, thinking=read_thinking(body, state.config.thinking).enabled)}
    return asked.params(defaults, state.engine.info.vocab_size)
