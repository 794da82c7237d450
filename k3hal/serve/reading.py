"""Reading a request: its body, its fields, and the work a long one makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from k3hal.serve.fields import check_fields
from k3hal.serve.http_io import read_json
from k3hal.serve.request_info import RequestInfo, info_of
from k3hal.serve.requests import read_request
from k3hal.serve.state import ServerState

R = TypeVar("R", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")

# From this many bytes of body on, so that no stream waits for what its prompt takes.
_LONG = 20_000


async def read_body(state: ServerState, request: Request) -> dict[str, Any]:
    """The body as a JSON object, within the server's limits."""
    return await read_json(request, state.config.max_body_bytes, state.config.body_timeout)


async def read_checked(state: ServerState, request: Request, kind: type[R]) -> tuple[dict[str, Any], R]:
    """The body as it came and as a `kind`; fields that `kind` does not know are reported or refused."""
    body = await read_body(state, request)
    check_fields(kind, body, info_of(request), refuse_unknown=state.config.refuse_unknown_fields)
    return body, read_request(kind, body)


async def beside(info: RequestInfo, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do `work` beside the event loop if the body is long, else at once."""
    if info.body_bytes >= _LONG:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)
