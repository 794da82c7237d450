"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from k3hal.errors import RequestError
from k3hal.serve.chat_prompt import RENDER_FIELDS
from k3hal.serve.http_errors import json_response
from k3hal.serve.reading import beside, read_checked
from k3hal.serve.request_info import info_of
from k3hal.serve.requests import check_ids
from k3hal.serve.state import ServerState
from k3hal.serve.turn import render_ids


class Tokenize(BaseModel):
    """Either `prompt` (ordinary text) or `messages` (rendered as a chat request)."""

    model_config = ConfigDict(extra="ignore", strict=True)
    RENDERED: ClassVar = RENDER_FIELDS

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    return_token_strs: bool | None = None


class Detokenize(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: list[int]


async def tokenize(state: ServerState, request: Request) -> Response:
    body, asked = await read_checked(state, request, Tokenize)
    info = info_of(request)
    state.model_name(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if asked.prompt is not None:
        ids = await beside(info, state.tokenizer.encode_ordinary, asked.prompt)
    else:
        _, ids = await render_ids(state, body, info)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": state.engine.info.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        answer["token_strs"] = [state.tokenizer.decode([token]) for token in ids]
    return json_response(answer)


async def detokenize(state: ServerState, request: Request) -> Response:
    _, asked = await read_checked(state, request, Detokenize)
    state.model_name(asked.model)
    check_ids(asked.tokens, state.tokenizer.vocab_size, "tokens")
    return json_response({"prompt": state.tokenizer.decode(asked.tokens)})
