"""The HTTP application called in this process: an offline request is checked and answered as a served one is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from k3hal.debug.arm import armed
from k3hal.engine.build import build_engine
from k3hal.offline.settings import Endpoint, GenerateSettings
from k3hal.serve.app import create_app
from k3hal.serve.state import ServerConfig, ServerState

logger = logging.getLogger(__name__)

_UNLIMITED = 2**31  # who sends the requests also decides how many wait


class LocalServer:
    """Answers API requests by calling the application; there is no socket and no API key."""

    def __init__(self, app: ASGIApp, max_num_seqs: int) -> None:
        self._app = app
        self.max_num_seqs = max_num_seqs

    async def post(self, endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status and the body of the answer, an error's included."""
        status = 0
        data = bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                data.extend(message.get("body", b""))

        await self._call(endpoint, body, send)
        return status, orjson.loads(data)

    async def stream(self, endpoint: Endpoint, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer. An error, at once or halfway, is a last chunk with the key `error`."""
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                chunks.put_nowait(message.get("body", b""))

        async def run() -> None:
            try:
                await self._call(endpoint, {**body, "stream": True}, send)
            finally:
                chunks.put_nowait(None)

        call = asyncio.create_task(run())
        try:
            # The application sends whole events, one or more, or an error's whole body, as one message.
            while (chunk := await chunks.get()) is not None:
                for event in chunk.split(b"\n\n"):
                    data = event.removeprefix(b"data: ").strip()
                    if data.startswith(b"{"):
                        yield orjson.loads(data)
            await call
        finally:
            call.cancel()

    async def _call(
        self, endpoint: Endpoint, body: Mapping[str, Any], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        # The standard module writes whatever a body holds, so that it is the server that refuses it.
        data = json.dumps(body).encode()
        pending: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        started = False

        async def receive() -> Message:
            if not pending:
                await asyncio.Event().wait()  # the client of a local call never leaves; cancelling the call ends it
            return pending.pop()

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": endpoint,
            "raw_path": endpoint.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "server": ("local", None),
            "client": None,
        }
        try:
            await self._app(scope, receive, watched)
        except Exception:
            # A crash is raised again after its answer, for a server to log; without an answer there is nothing else.
            if not started:
                raise
            logger.exception("the request crashed")


@contextlib.asynccontextmanager
async def local_server(settings: GenerateSettings) -> AsyncIterator[LocalServer]:
    """The model of `settings` behind a local server, closed at the end. Raises what loading it raises."""
    with armed(os.environ):
        built = build_engine(settings.model, **settings.engine_options(), max_queue=_UNLIMITED)
    config = ServerConfig(
        model_names=(settings.served_model_name or built.model_name,),
        generation_defaults=dict(built.generation_defaults),
        warm_up="off",
    )
    app = create_app(ServerState(built.engine, built.tokenizer, config))
    async with app.router.lifespan_context(app):
        yield LocalServer(app, built.engine.info.max_num_seqs)
