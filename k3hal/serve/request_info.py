"""What is known of one HTTP request while it is answered: its id, what to tell its client, what to log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3hal.serve.logs import FIELDS

_LOG = logging.getLogger("k3hal.serve.requests")
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_KEY = "k3hal.request"
_NAMED_FIELDS = 16


@dataclass(slots=True)
class RequestInfo:
    """One per request. `facts` are figures for its log line and span; nothing a user wrote is among them."""

    id: str
    begun: float = field(default_factory=time.monotonic)
    body_bytes: int = 0
    owner: str = ""
    """Who asks: a name for the API key that came along, empty where none is needed."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that had no effect, to be told in `X-Ignored-Fields`."""
    facts: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    """What has been answered; 499 where the client had left by then."""
    prompt: str | None = None
    """What the model was shown; only kept where the log is to have it."""

    def figures(self) -> dict[str, Any]:
        """All there is to say without a user's words."""
        ignored = {"ignored_fields": list(field_names(self.ignored))} if self.ignored else {}
        return {**self.facts, **ignored, "duration_s": time.monotonic() - self.begun}


def info_of(request: Request) -> RequestInfo:
    return info_in(request.scope)


def info_in(scope: Scope) -> RequestInfo:
    return scope[_KEY]


class RequestInfos:
    """ASGI middleware: makes the `RequestInfo`, sends its headers along with any answer, and logs it at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        info = RequestInfo(_request_id(Headers(scope=scope)))
        scope[_KEY] = info

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = headers["Request-Id"] = info.id  # as OpenAI's and Anthropic's clients read it
                if info.ignored:
                    headers["X-Ignored-Fields"] = ", ".join(field_names(info.ignored))
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        except Exception:
            info.status = 500
            raise
        finally:
            _log(scope, info)


def _log(scope: Scope, info: RequestInfo) -> None:
    """A line for what came through the API; probes and scrapes would drown the rest."""
    level = logging.INFO if scope["path"].startswith("/v1/") else logging.DEBUG
    if _LOG.isEnabledFor(level):
        prompt = {} if info.prompt is None else {"prompt": info.prompt}
        request = {"request_id": info.id, "method": scope["method"], "path": scope["path"], "status": info.status}
        _LOG.log(level, "request", extra={FIELDS: {**request, **info.figures(), **prompt}})


def field_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names from a body in a form that fits a header, however many and whatever they are."""
    shown = [quote(name, safe="[]")[:64] for name in sorted(names)]
    more = len(shown) - _NAMED_FIELDS
    return (*shown[:_NAMED_FIELDS], f"{more} more") if more > 0 else tuple(shown)


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's `X-Request-Id` if it is one that can be logged and sent back, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _GIVEN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
