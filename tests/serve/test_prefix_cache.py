"""The prefix cache as a client sees it: cached tokens in usage, salts, and metrics that add up."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from k3hal.engine.build import build_engine
from k3hal.serve.server import Server, bind, url_of
from k3hal.serve.state import ServerConfig, ServerState

LONG = "All work and no play makes Jack a dull boy. " * 12


@contextmanager
def serving(nano_dir: Path, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server over the nano model."""
    built = build_engine(str(nano_dir), device="cpu", dtype="float32", max_model_len=2048, max_num_seqs=4, **options)
    state = ServerState(built.engine, built.tokenizer, ServerConfig(model_names=("nano",), warm_up="off"))
    ready = threading.Event()
    server = Server(state, announce=lambda _: ready.set(), begun=time.monotonic())
    with bind("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(20)
            with httpx.Client(base_url=url_of(sock), timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def http(nano_dir: Path) -> Iterator[httpx.Client]:
    with serving(nano_dir) as client:
        yield client


def ask(http: httpx.Client, user: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """The message, and how much of the prompt was cached."""
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": user}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_another_question_after_the_same_system_message_starts_after_it(http: httpx.Client) -> None:
    first, none = ask(http, "What is that?", cache_salt="a")
    second, cached = ask(http, "Who was it?", cache_salt="a")
    assert none == 0
    assert cached > 128
    assert ask(http, "Who was it?", cache_salt="b") == (second, 0)
    again, whole = ask(http, "What is that?", cache_salt="a")
    assert again == first
    assert whole >= cached


def test_hits_and_misses_add_up_to_the_prompt_tokens(http: httpx.Client) -> None:
    ask(http, "And then?", cache_salt="c")
    ask(http, "And then?", cache_salt="c")
    text = http.get("/metrics").text

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^k3hal_{name}_total{{[^}}]*}} (\S+)", text, re.MULTILINE))

    assert total("prefix_cache_hits") > 0
    assert total("prefix_cache_hits") + total("prefix_cache_misses") == total("prefix_cache_queries")
    assert 'reason="cold"' in text
    assert "vllm:prefix_cache_hits_total" in text


def test_a_salt_that_is_no_text_is_refused(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json={"prompt": "x", "cache_salt": 5})
    assert refused.status_code == 400
    assert "cache_salt" in refused.json()["error"]["message"]


def test_a_server_with_a_disk_cache_goes_on_after_a_restart(nano_dir: Path, tmp_path: Path) -> None:
    said = []
    for run in range(2):
        with serving(nano_dir, prefix_disk_cache=tmp_path, prefix_host_cache_gb=0.2) as http:
            said.append(ask(http, "What is that?"))
            text = http.get("/metrics").text
        assert ("k3hal_external_prefix_cache_hits_total" in text) == ("vllm:external_prefix_cache_hits_total" in text)
        hits = re.search(r"^vllm:external_prefix_cache_hits_total{[^}]*} (\S+)", text, re.MULTILINE)
        assert hits is not None
        assert float(hits[1]) == said[run][1]
        assert re.search(r'external_prefix_cache_failures_total{[^}]*reason="corrupt"} 0', text)
    assert said[0][0] == said[1][0]
    assert said[0][1] == 0
    assert said[1][1] > 128


def test_without_an_external_tier_nothing_is_said_of_one(http: httpx.Client) -> None:
    assert "external_prefix_cache" not in http.get("/metrics").text
