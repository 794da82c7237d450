"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from k3hal.errors import RequestError
from k3hal.serve.fields import renamed
from k3hal.serve.generate import with_keep_alive
from k3hal.serve.http_errors import json_response
from k3hal.serve.http_io import KEEP_ALIVE, EventStream, connected
from k3hal.serve.messages.errors import stream_error
from k3hal.serve.messages.events import MessageAnswer
from k3hal.serve.messages.request import CountRequest, MessagesRequest, chat_body, left_out
from k3hal.serve.reading import read_checked
from k3hal.serve.request_info import RequestInfo, info_of
from k3hal.serve.requests import ChatRequest, read_request
from k3hal.serve.state import ServerState
from k3hal.serve.turn import begin_turn, render_ids


async def messages(state: ServerState, request: Request) -> Response:
    _, asked = await read_checked(state, request, MessagesRequest)
    info = info_of(request)
    _tell_left_out(state, asked, info)
    body, names = chat_body(asked)
    with renamed(names):
        turn = await begin_turn(state, read_request(ChatRequest, body), body, info, "msg_", names)
    answer = MessageAnswer(turn, hidden=(asked.thinking or {}).get("display") == "omitted")
    if asked.stream:
        events = with_keep_alive(answer.events(), state.config.keep_alive, KEEP_ALIVE)
        return EventStream(events, turn.run, failure=stream_error)
    async with connected(request.receive, turn.run):
        return json_response(await answer.whole())


async def count_tokens(state: ServerState, request: Request) -> Response:
    _, asked = await read_checked(state, request, CountRequest)
    state.model_name(asked.model)
    info = info_of(request)
    _tell_left_out(state, asked, info)
    body, names = chat_body(asked)
    with renamed(names):
        _, ids = await render_ids(state, body, info)
    return json_response({"input_tokens": len(ids)})


def _tell_left_out(state: ServerState, asked: CountRequest, info: RequestInfo) -> None:
    """Tools without a schema are told as ignored, or refused like unknown fields."""
    names = left_out(asked)
    if names and state.config.refuse_unknown_fields:
        raise RequestError(f"{names[0]:.100}: there are no built-in tools", param="tools")
    info.ignored = (*info.ignored, *names)
