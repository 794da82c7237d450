"""A malformed request to a real engine is answered with its status and one line that names the field."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from k3hal.engine.build import build_engine
from k3hal.serve.app import create_app
from k3hal.serve.state import ServerConfig, ServerState

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(nano_dir: Path) -> Iterator[TestClient]:
    built = build_engine(str(nano_dir), device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4)
    state = ServerState(built.engine, built.tokenizer, ServerConfig(model_names=("nano",), warm_up="off"))
    with TestClient(create_app(state), headers={"Content-Type": "application/json"}) as client:
        yield client


# endpoint, body (text is sent as it is), status, the field named, the message
REQUESTS: list[tuple[str, Any, int, str | None, str]] = [
    (TEXT, "", 400, None, "the body is not JSON"),
    (TEXT, "{", 400, None, "the body is not JSON"),
    (TEXT, "[" * 100_000, 400, None, "the body is not JSON"),
    (TEXT, '{"prompt": "x", "temperature": NaN}', 400, None, "the body is not JSON"),
    (TEXT, r'{"prompt": "\ud83d"}', 400, None, "the body is not JSON"),
    (TEXT, [], 400, None, "the body must be a JSON object"),
    (TEXT, {}, 400, "prompt", "prompt is missing"),
    (TEXT, {"prompt": ""}, 400, "prompt", "the prompt is empty"),
    (TEXT, {"prompt": 3}, 400, "prompt", "prompt must be a text, .* got 3"),
    (TEXT, {"prompt": [[]]}, 400, "prompt", "the prompt is empty"),
    (TEXT, {"prompt": [-1]}, 400, "prompt", "token id -1 is outside the vocabulary of 625"),
    (TEXT, {"prompt": [10**30]}, 400, "prompt", "prompt must be a text, .* got"),
    (TEXT, {"prompt": [1] * 600}, 400, "prompt", "600 tokens, but the context is 512"),
    (TEXT, {"prompt": "x", "model": "other"}, 404, "model", "'other' does not exist"),
    (TEXT, {"prompt": "x", "max_tokens": 2**40}, 400, "max_tokens", f"must be in .* got {2**40}"),
    (TEXT, {"prompt": "x", "n": 129}, 400, "n", "n must be in .1, 128., got 129"),
    (TEXT, {"prompt": "x", "logprobs": 21}, 400, "logprobs", "logprobs must be in"),
    (TEXT, {"prompt": "x", "stop": 3}, 400, "stop", "stop must be a text or a list of texts, got 3"),
    (
        TEXT,
        {"prompt": "x", "stop": [str(i) for i in range(33)]},
        400,
        "stop",
        "stop must hold at most 32 texts, got 33",
    ),
    (TEXT, {"prompt": "x", "logit_bias": {"²": 1}}, 400, "logit_bias", "keys are token ids below 625, got '²'"),
    (TEXT, {"prompt": "x", "seed": 2**70}, 400, "seed", "seed"),
    (CHAT, {"messages": "Hi"}, 400, "messages", "messages must be a non-empty list"),
    (CHAT, {"messages": [HI]}, 400, "messages[0]", r"messages\[0\] must be an object"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "is missing"),
    (CHAT, {"messages": [{"role": "cook", "content": "x"}]}, 400, "messages[0].role", "got 'cook'"),
    (CHAT, {"messages": HI, "tools": [{"type": "magic"}]}, 400, "tools[0].type", 'must be "function", got'),
    (CHAT, {"messages": HI, "reasoning_effort": "some"}, 400, "reasoning_effort", "one of .* got 'some'"),
    (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature", r"temperature must be in \[0, 100\], got -1"),
    ("/tokenize", {}, 400, "prompt", "give either prompt or messages"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens", "tokens"),
    ("/v1/embeddings", {"input": "x"}, 404, None, "/v1/embeddings: the served model does not make embeddings"),
]


def test_the_requests_that_are_spoilt_below_work(client: TestClient) -> None:
    for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": HI})):
        response = client.post(path, json={**body, "max_tokens": 1})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), REQUESTS)
def test_a_bad_request_is_one_line(
    client: TestClient,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: Any,
    status: int,
    param: str | None,
    message: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        response = client.post(path, content=body if isinstance(body, str) else json.dumps(body))
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(message, error["message"]), error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 300
    assert caplog.records == [], "a client's mistake is nothing for the server's log"
