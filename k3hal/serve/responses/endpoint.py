"""`/v1/responses`: making, getting and deleting responses."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from k3hal.errors import RequestError
from k3hal.serve.fields import renamed
from k3hal.serve.generate import with_keep_alive
from k3hal.serve.http_errors import HttpError, json_response
from k3hal.serve.http_io import KEEP_ALIVE, EventStream, connected
from k3hal.serve.reading import read_checked
from k3hal.serve.request_info import RequestInfo, info_of
from k3hal.serve.requests import ChatRequest, read_request
from k3hal.serve.responses.answer import ResponseAnswer
from k3hal.serve.responses.request import CountRequest, Item, ResponsesRequest, chat_body
from k3hal.serve.responses.tools import Toolbox, read_tools
from k3hal.serve.state import ServerState
from k3hal.serve.turn import begin_turn, render_ids


async def responses(state: ServerState, request: Request) -> Response:
    _, asked = await read_checked(state, request, ResponsesRequest)
    info = info_of(request)
    earlier, own = _conversation(state, asked, info)
    tools = _tools(state, asked, info)
    body, names = chat_body(asked, earlier, own, tools)
    with renamed(names):
        turn = await begin_turn(state, read_request(ChatRequest, body), body, info, "resp_", names)
    kept = asked.store is not False and state.config.max_stored_responses > 0

    def finished(response: dict[str, Any]) -> None:
        if kept:
            state.responses.put(info.owner, response, (*earlier, *own, *response["output"]))

    answer = ResponseAnswer(asked, turn, tools, state.tokenizer, kept, finished)
    if asked.stream:
        events = with_keep_alive(answer.events(), state.config.keep_alive, KEEP_ALIVE, after=2)
        return EventStream(events, turn.run, failure=answer.failed)
    async with connected(request.receive, turn.run):
        return json_response(await answer.whole())


async def input_tokens(state: ServerState, request: Request) -> Response:
    _, asked = await read_checked(state, request, CountRequest)
    state.model_name(asked.model)
    info = info_of(request)
    body, names = chat_body(asked, *_conversation(state, asked, info), _tools(state, asked, info))
    with renamed(names):
        _, ids = await render_ids(state, body, info)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_response(state: ServerState, request: Request) -> Response:
    return json_response(state.responses.get(info_of(request).owner, request.path_params["name"]).response)


async def delete_response(state: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    state.responses.delete(info_of(request).owner, name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel_response(state: ServerState, request: Request) -> Response:
    """Only background responses can be cancelled, and there are none: to stop one, close its connection."""
    state.responses.get(info_of(request).owner, request.path_params["name"])
    raise HttpError(400, "the response is complete: it was not made in the background", kind="invalid_request_error")


def _tools(state: ServerState, asked: CountRequest, info: RequestInfo) -> Toolbox:
    """The request's tools; those built into other servers are told as ignored, or refused like unknown fields."""
    tools = read_tools(asked.tools or ())
    if tools.left_out and state.config.refuse_unknown_fields:
        raise RequestError(f"{tools.left_out[0]:.100}: there are no built-in tools", param="tools")
    info.ignored = (*info.ignored, *tools.left_out)
    return tools


def _conversation(state: ServerState, asked: CountRequest, info: RequestInfo) -> tuple[tuple[Item, ...], list[Item]]:
    """The items of the response that is continued, and the request's own."""
    earlier: tuple[Item, ...] = ()
    if asked.previous_response_id is not None:
        earlier = state.responses.get(info.owner, asked.previous_response_id, "previous_response_id").items
    own = [_looked_up(state, item, info, f"input[{i}]") for i, item in enumerate(asked.items())]
    if not (own or earlier):
        raise RequestError("input is missing", param="input")
    return earlier, own


def _looked_up(state: ServerState, item: Item, info: RequestInfo, where: str) -> Item:
    if item.get("type") != "item_reference":
        return item
    found = state.responses.item(info.owner, item.get("id"))
    if found is None:
        raise RequestError(f"{where} refers to an item that is not stored here (any more)", param=where)
    return found
