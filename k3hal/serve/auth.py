"""API keys: everything under `/v1` needs one when the server has any."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from k3hal.serve.error_shapes import error_response
from k3hal.serve.http_errors import HttpError


class ApiKeyGuard:
    """ASGI middleware. Keys are compared by digest in constant time, every one of them each time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._guards(scope) and not self._allowed(Headers(scope=scope)):
            error = HttpError(401, "missing or wrong API key", kind="authentication_error", code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guards(self, scope: Scope) -> bool:
        path = scope["path"]
        return bool(self._digests) and scope["method"] != "OPTIONS" and (path == "/v1" or path.startswith("/v1/"))

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get("x-api-key", "")  # as Anthropic's clients send it
        given = _digest(token.strip().encode("latin-1"))  # undoes how ASGI headers are decoded
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
