"""Errors as Anthropic's API shapes them."""

from __future__ import annotations

from typing import Any

from k3hal.serve.http_errors import HttpError
from k3hal.serve.http_io import named_event

PREFIX = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: HttpError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def stream_error(error: HttpError) -> bytes:
    """The last event of a stream that fails."""
    return named_event("error", anthropic_error(error))
