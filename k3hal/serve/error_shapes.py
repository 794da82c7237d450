"""Refusals in the shape of the API that a path belongs to."""

from __future__ import annotations

from starlette.responses import Response

from k3hal.serve.http_errors import HttpError, error_body, json_response
from k3hal.serve.messages.errors import PREFIX, anthropic_error


def error_response(error: HttpError, path: str) -> Response:
    shape = anthropic_error if path == PREFIX or path.startswith(f"{PREFIX}/") else error_body
    return json_response(shape(error), error.status, error.headers)
