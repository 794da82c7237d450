"""Who may use `/v1`: a key where the server has any, and within the key's limits."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from k3hal.serve.error_shapes import error_response
from k3hal.serve.http_errors import HttpError
from k3hal.serve.keys import KeyRing, Limits
from k3hal.serve.limiter import Limiter
from k3hal.serve.metrics import Metrics
from k3hal.serve.request_info import info_in

INTERNAL = "k3hal.internal"
"""In the scope of a request that the server makes itself; nothing a client sends can put it there."""


class ApiKeyGuard:
    """ASGI middleware. Without keys, `limits` hold for all clients together. Only a POST counts against limits."""

    def __init__(self, app: ASGIApp, keys: KeyRing, limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._limiter = Limiter()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _guarded(scope) or INTERNAL in scope:
            await self._app(scope, receive, send)
            return
        owner, limits = "", self._limits
        if self._keys.guards:
            key = self._keys.find(_token(Headers(scope=scope)))
            if key is None:
                await error_response(_unauthorized(), scope["path"])(scope, receive, send)
                return
            owner, limits = key.owner, key.limits
            info = info_in(scope)
            info.owner = owner
            info.facts["key"] = key.name
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._limiter.enter(owner, limits)
        except HttpError as refusal:
            self._metrics.rejected(refusal.code or "")
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._limiter.leave(owner)


def _guarded(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] != "OPTIONS" and (path == "/v1" or path.startswith("/v1/"))


def _token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return (token if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def _unauthorized() -> HttpError:
    error = HttpError(401, "missing or wrong API key", kind="authentication_error", code="invalid_api_key")
    error.headers["WWW-Authenticate"] = "Bearer"
    return error
