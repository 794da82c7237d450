"""Reading a JSON body within a limit, and answering while watching for the client to leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from k3hal.errors import K3HALError
from k3hal.serve.http_errors import HttpError, error_body, from_k3hal
from k3hal.serve.request_info import info_of
from k3hal.serve.router import DisconnectedError

_LOG = logging.getLogger("k3hal.serve")

_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.ASCII | re.IGNORECASE)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


async def read_json(request: Request, limit: int, timeout: float) -> dict[str, Any]:
    """The body as a JSON object; 415 where it is not declared as JSON as it is, 413 beyond `limit` bytes, 408 after
    `timeout` seconds, 400 if it is anything else."""
    _check_declared(request.headers)
    too_large = HttpError(413, f"the body is larger than {limit} bytes", kind="invalid_request_error")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        late = HttpError(408, f"the body took longer than {timeout:g} s", kind="invalid_request_error")
        late.headers["Connection"] = "close"
        raise late from None
    except ClientDisconnect:
        raise DisconnectedError from None
    info_of(request).body_bytes = len(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error}", kind="invalid_request_error") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", kind="invalid_request_error")
    return value


def _check_declared(headers: Headers) -> None:
    """Refuse what is not declared as JSON: other types a browser sends for pages of any origin without asking first."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        refusal = _unsupported(f"the body has the Content-Encoding {encoding!r:.40}: send it as it is")
        refusal.headers["Accept-Encoding"] = "identity"
        raise refusal
    declared = headers.get("content-type", "")
    if not _JSON_TYPE.fullmatch(declared.partition(";")[0].strip()):
        given = f"has the Content-Type {declared!r:.80}" if declared else "has no Content-Type"
        refusal = _unsupported(f"the body {given}: it must be application/json")
        refusal.headers["Accept-Post"] = "application/json"
        raise refusal


def _unsupported(message: str) -> HttpError:
    return HttpError(415, message, kind="invalid_request_error", code="unsupported_media_type")


class Work(Protocol):
    """What a response waits for."""

    def disconnect(self) -> None:
        """The client is gone."""
        ...

    def close(self) -> None: ...


@contextlib.asynccontextmanager
async def connected(receive: Receive, work: Work) -> AsyncIterator[None]:
    """Within the block, tell `work` as soon as the client closes the connection; close it at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        work.close()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def _failed(error: HttpError) -> bytes:
    return event(error_body(error))


class EventStream(Response):
    """Server-sent events. A failure after the first byte becomes a last event, made by `failure`, and the end."""

    def __init__(
        self, events: AsyncIterator[bytes], work: Work, *, failure: Callable[[HttpError], bytes] = _failed
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._work = work
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with connected(receive, self._work):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self._events:
                    await write(chunk)
            except DisconnectedError:
                return
            except HttpError as error:
                await write(self._failure(error))
            except Exception as error:  # noqa: BLE001 - the status is sent already: log it and end the stream
                _LOG.exception("a stream failed")
                await write(self._failure(_as_http(error)))
            await write(b"", more=False)


def _as_http(error: Exception) -> HttpError:
    if isinstance(error, K3HALError):
        return from_k3hal(error)
    return HttpError(500, "internal error; the server's log has the details", kind="server_error")
