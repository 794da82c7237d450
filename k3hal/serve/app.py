"""The HTTP application: routes, errors, and the life of the engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from k3hal import __version__
from k3hal.errors import K3HALError
from k3hal.serve.auth import ApiKeyGuard
from k3hal.serve.chat import chat_completions, render
from k3hal.serve.completions import completions
from k3hal.serve.error_shapes import error_response
from k3hal.serve.http_errors import HttpError, from_k3hal, json_response
from k3hal.serve.messages.endpoint import count_tokens, messages
from k3hal.serve.openapi import openapi
from k3hal.serve.page import add_page
from k3hal.serve.request_info import RequestInfos, info_of
from k3hal.serve.responses.endpoint import cancel_response, delete_response, get_response, input_tokens, responses
from k3hal.serve.router import DisconnectedError
from k3hal.serve.state import ServerState
from k3hal.serve.tokens import detokenize, tokenize
from k3hal.serve.tracing import Traces
from k3hal.serve.warm_up import warm_up

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[ServerState, Request], Awaitable[Response]]


def create_app(state: ServerState, traces: TracerProvider | None = None) -> FastAPI:
    """The application of a server that has not started yet; its lifespan starts and closes the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.router.start()
        warmed = asyncio.create_task(warm_up(state, app))
        try:
            yield
        finally:
            warmed.cancel()
            state.drain()
            state.constraints.close()
            await asyncio.to_thread(state.engine.close)

    app = FastAPI(title="k3hal", version=__version__, lifespan=lifespan, openapi_url=None)
    config = state.config
    app.add_middleware(ApiKeyGuard, keys=state.keys, limits=config.limits, metrics=state.metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"],
        )
    if traces is not None:
        app.add_middleware(Traces, provider=traces)
    app.add_middleware(RequestInfos)
    for path, handler in _POSTS.items():
        app.add_route(path, _bind(state, handler), methods=["POST"])
    for path, handler in _GETS.items():
        app.add_route(path, _bind(state, handler), methods=["GET"])
    app.add_route("/v1/responses/{name}", _bind(state, delete_response), methods=["DELETE"])
    if state.config.page:
        add_page(app, state)
    _add_error_handlers(app, state)
    return app


async def _models(state: ServerState, _: Request) -> Response:
    """The list in OpenAI's form and in Anthropic's at once: their fields do not collide."""
    models = [_model(state, name) for name in state.config.model_names]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": models, **ends})


async def _one_model(state: ServerState, request: Request) -> Response:
    return json_response(_model(state, state.model_name(request.path_params["name"])))


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "k3hal",
        "root": state.config.model_names[0],
        "parent": None,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_model_len": state.engine.info.max_model_len,
    }


async def _health(state: ServerState, _: Request) -> Response:
    dead = state.engine.stats().dead
    return json_response(
        {"status": "ok"} if dead is None else {"status": "dead", "reason": dead}, 200 if dead is None else 503
    )


async def _load(state: ServerState, _: Request) -> Response:
    stats = state.engine.stats()
    return json_response(
        {
            "server_load": stats.num_running + stats.num_waiting,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_usage,
        }
    )


async def _no_embeddings(_: ServerState, __: Request) -> Response:
    raise HttpError(404, "/v1/embeddings: the served model does not make embeddings", kind="invalid_request_error")


async def _ready(state: ServerState, _: Request) -> Response:
    return json_response({"status": state.status}, 200 if state.status == "ready" else 503)


async def _metrics(state: ServerState, _: Request) -> Response:
    return Response(state.metrics.render(), media_type=_METRICS_TYPE)


async def _openapi(_: ServerState, __: Request) -> Response:
    return json_response(openapi())


async def _version(_: ServerState, __: Request) -> Response:
    return json_response({"version": __version__})


_POSTS: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/chat/completions/render": render,
    "/v1/completions": completions,
    "/v1/embeddings": _no_embeddings,
    "/v1/responses": responses,
    "/v1/responses/input_tokens": input_tokens,
    "/v1/responses/{name}/cancel": cancel_response,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
_GETS: dict[str, Handler] = {
    "/v1/models": _models,
    "/v1/models/{name:path}": _one_model,
    "/v1/responses/{name}": get_response,
    "/health": _health,
    "/ping": _health,
    "/load": _load,
    "/ready": _ready,
    "/metrics": _metrics,
    "/version": _version,
    "/openapi.json": _openapi,
}


def _bind(state: ServerState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(state, request)

    return endpoint


def _add_error_handlers(app: FastAPI, state: ServerState) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, K3HALError)
        refusal = from_k3hal(error)
        if refusal.status in (429, 503):
            state.metrics.rejected(error.code)
        return error_response(refusal, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return error_response(error, request.url.path)

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail.lower()}"
        refusal = HttpError(error.status_code, message, kind="invalid_request_error")
        refusal.headers |= error.headers or {}
        return error_response(refusal, request.url.path)

    async def gone(_: Request, __: Exception) -> Response:
        # Nobody reads this; 499 is what logs conventionally show for it.
        return Response(status_code=499)

    async def crash(request: Request, _: Exception) -> Response:
        # Starlette logs the traceback after this answer.
        refusal = HttpError(500, "internal error; the server's log has the details", kind="server_error")
        refusal.headers["X-Request-Id"] = info_of(request).id  # made outside of what adds it to other answers
        return error_response(refusal, request.url.path)

    app.add_exception_handler(K3HALError, ours)
    app.add_exception_handler(HttpError, http)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(DisconnectedError, gone)
    app.add_exception_handler(Exception, crash)
