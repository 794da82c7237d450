"""The page's routes: its document at `/`, its files under `/page/`, and the two things it asks for itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from k3hal.serve.http_errors import json_response
from k3hal.serve.page.facts import about, live
from k3hal.serve.state import ServerState

_FILES = Path(__file__).parent / "static"

# Nothing from anywhere else is loaded, run or shown, and no script or style stands in the document.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for again each time, so that a page never runs with the scripts of another version.
    "Cache-Control": "no-cache",
}


class _PageFiles(StaticFiles):
    """The folder of static files, each sent with the page's headers."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response


def add_page(app: Starlette, state: ServerState) -> None:
    """Serve the page on `app`. None of it needs an API key: the page asks its user for one and sends it to `/v1`."""
    files = _PageFiles(directory=_FILES)

    async def page(request: Request) -> Response:
        return await files.get_response("page.html", request.scope)

    async def facts(_: Request) -> Response:
        return json_response(about(state), headers={"Cache-Control": "no-store"})

    async def figures(_: Request) -> Response:
        return json_response(live(state), headers={"Cache-Control": "no-store"})

    app.add_route("/", page, methods=["GET"])
    app.add_route("/page/about", facts, methods=["GET"])
    app.add_route("/page/live", figures, methods=["GET"])
    app.mount("/page", files)
