"""Errors as the OpenAI API shapes them."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from k3hal.engine.interface import EngineOutput
from k3hal.errors import DrainingError, K3HALError, QueueFullError, RequestError, UnsupportedError


class HttpError(Exception):
    """A refusal with a status of its own."""

    def __init__(
        self, status: int, message: str, *, kind: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.headers: dict[str, str] = {}


def raise_if_failed(output: EngineOutput, constrained_by: str | None = None) -> None:
    """Raise the `HttpError` of an output that ends its request without an answer.

    `constrained_by` names the field that a constraint came from, which is to blame for one that leads nowhere.
    """
    if output.dead_end:
        message = f"the answer is not complete, and {constrained_by} allows nothing that continues it"
        kind, code = "invalid_request_error", "constraint_dead_end"
        raise HttpError(400, message, kind=kind, code=code, param=constrained_by)
    if output.finish_reason == "error":
        raise HttpError(500, output.error or "the engine failed", kind="server_error", code="engine_error")
    if output.finish_reason == "abort":
        raise HttpError(503, "the server stopped before the answer was complete", kind="unavailable_error")


def from_k3hal(error: K3HALError) -> HttpError:
    """The HTTP form of one of our errors."""
    if isinstance(error, QueueFullError):
        refusal = HttpError(429, str(error), kind="rate_limit_error", code=error.code)
        refusal.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        return refusal
    if isinstance(error, DrainingError):
        refusal = HttpError(503, str(error), kind="unavailable_error", code=error.code)
        refusal.headers |= {"Retry-After": "1", "Connection": "close"}
        return refusal
    if isinstance(error, RequestError):
        return HttpError(400, str(error), kind="invalid_request_error", code=error.code, param=error.param)
    if isinstance(error, UnsupportedError):
        return HttpError(400, str(error), kind="invalid_request_error", code=error.code)
    return HttpError(500, str(error), kind="server_error", code=error.code)


def error_body(error: HttpError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")
