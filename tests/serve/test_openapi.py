"""The API's own document, and what a server does with everything that the document allows and forbids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

schemathesis: Any = pytest.importorskip("schemathesis")
hypothesis: Any = pytest.importorskip("hypothesis")

SLOW = list(hypothesis.HealthCheck)
PATHS = [
    "/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(running: Any, turn: Any) -> Iterator[Any]:
    with running([turn("a", "b")], {"max_model_len": 4000}) as made:
        yield made


@pytest.fixture(scope="module")
def document(server: Any) -> dict[str, Any]:
    with server.client() as http:
        return http.get("/openapi.json").json()


def test_every_route_is_in_the_document(server: Any, document: dict[str, Any]) -> None:
    routes = [route for route in server.server.config.app.routes if isinstance(route, Route)]
    routes = [route for route in routes if route.path != "/" and not route.path.startswith("/page")]  # for people
    served = {(route.path.replace(":path", ""), method.lower()) for route in routes for method in route.methods or ()}
    told = {(path, method) for path, operations in document["paths"].items() for method in operations}
    untold = {path for path, method in served - told if method != "head"}
    assert untold == {"/openapi.json", "/v1/embeddings"}
    assert told <= served


def test_the_document_is_valid_and_complete(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["chat_completions"]
    assert {"messages", "temperature", "tools", "thinking_effort", "priority", "stream_options"} <= set(
        chat["properties"]
    )
    assert chat["required"] == ["messages"]
    assert schemathesis.openapi.from_dict(document).validate() is None


def check(document: dict[str, Any], server: Any, path: str, examples: int) -> None:
    """Ask what hypothesis makes of an operation's schema, valid and not; a 500 or an undocumented answer fails."""
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    wanted = [schemathesis.checks.not_a_server_error, *map(schemathesis.checks.CHECKS.get_one, names)]
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

        @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=SLOW)
        @hypothesis.seed(1)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(base_url=server.url, checks=wanted, timeout=20)

        ask()
    assert server.engine.stats().num_running == 0


@pytest.mark.parametrize("path", PATHS)
def test_no_body_breaks_an_endpoint(document: dict[str, Any], server: Any, path: str) -> None:
    check(document, server, path, examples=6)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", PATHS)
def test_many_bodies_break_no_endpoint(document: dict[str, Any], server: Any, path: str) -> None:
    check(document, server, path, examples=300)


def test_the_document_is_json_of_its_own(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document)) == document
