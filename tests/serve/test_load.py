"""Many clients at once, and clients that vanish: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from k3hal.cli import main
from k3hal.engine.build import build_engine
from k3hal.engine.replay_file import ReplayLine

# More tokens than could come while a test waits: what is over by then was aborted.
STREAM = {"max_tokens": 8000, "ignore_eos": True, "stream": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {**STREAM, "prompt": "All work and no play makes Jack a dull boy."},
    "/v1/chat/completions": {**STREAM, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {**STREAM, "model": "k3", "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture
def paced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`paced(flags)`: the report of `bench serve --paced` with these flags, which must have gone well."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def run(*flags: object) -> dict[str, Any]:
        code = main(["bench", "serve", *map(str, flags), "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return run


def check_paced(report: dict[str, Any], streams: int, tokens: int) -> None:
    """Every token of every stream came, once and in its place."""
    assert (report["completed"], report["failed"], report["wrong_answers"]) == (streams, 0, 0)
    assert report["total_output_tokens"] == streams * tokens
    assert report["max_concurrent_requests"] == streams


def test_streams_at_a_pace_get_every_token_once(paced) -> None:
    flags = ["--paced", 40, "--num-prompts", 60, "--output-len", 60, "--input-len", 8]
    check_paced(paced(*flags, "--endpoint", "/v1/chat/completions"), 60, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_200_streams_of_20_tokens_a_second_get_every_token_once(paced, endpoint: str) -> None:
    report = paced("--paced", 20, "--num-prompts", 200, "--output-len", 600, "--endpoint", endpoint)
    check_paced(report, 200, 600)
    print({key: value for key, value in report.items() if "pace_delay" in key or "cpu" in key})


async def _vanish(url: str, path: str, body: dict[str, Any], after: int, *, reset: bool) -> bool:
    """Ask, read `after` reads of the answer, and be gone: by a close, or by a reset that says nothing.

    Whether nothing was wrong with what came.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    got = b""
    for _ in range(after):
        got += await reader.read(4096)
    if reset:
        writer.transport.abort()
    writer.close()
    return after == 0 or got.startswith(b"HTTP/1.1 200 ")


async def _vanish_all(url: str, count: int, at_once: int, seed: int) -> int:
    """`count` vanishing clients, `at_once` at a time, over all endpoints; of how many nothing was wrong."""
    rng = np.random.default_rng(seed)
    free = asyncio.Semaphore(at_once)

    async def one(number: int) -> bool:
        path = list(REQUESTS)[number % len(REQUESTS)]
        after, reset = int(rng.integers(0, 6)), bool(rng.integers(0, 2))
        async with free:
            return await _vanish(url, path, REQUESTS[path], after, reset=reset)

    return sum(await asyncio.gather(*map(one, range(count))))


def _gauges(http: httpx.Client) -> dict[str, float]:
    """What running requests hold, as the metrics say."""
    text = http.get("/metrics").text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {name: re.search(rf"^k3hal_{name}{{.*}} (.*)$", text, re.MULTILINE) for name in names}
    return {name: float(match.group(1)) for name, match in found.items() if match}


def _check_vanishing(server: Any, count: int, at_once: int) -> None:
    """Let clients vanish: everything is as it was before, and all of the engine's places can be had again."""
    places = server.engine.info.max_num_seqs
    with server.client() as http:
        before = _gauges(http)
        assert len(before) == 3 and set(before.values()) == {0.0}
        assert asyncio.run(_vanish_all(server.url, count, at_once, seed=count)) == count
        _eventually(lambda: _gauges(http) == before and not server.state.router.open_requests)
        assert float(re.findall(r"k3hal_client_disconnects_total{.*} (.*)", http.get("/metrics").text)[0]) > 0
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "n": places, "ignore_eos": True})
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * places
        _eventually(lambda: _gauges(http) == before)


def _eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def _replay(running: Callable[..., AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    return running([ReplayLine((65,) * 20_000, step_s=0.02)], {"max_num_seqs": 64})


def test_clients_that_vanish_leave_nothing_behind(running) -> None:
    with _replay(running) as server:
        _check_vanishing(server, 150, 80)


@pytest.mark.nightly
def test_1000_clients_that_vanish_leave_nothing_behind(running) -> None:
    with _replay(running) as server:
        _check_vanishing(server, 1000, 200)


def _model(serving: Callable[..., AbstractContextManager[Any]], folder: Path) -> AbstractContextManager[Any]:
    """A server over a real engine, whose slots and pages can be lost."""
    built = build_engine(str(folder), device="cpu", dtype="float32", max_model_len=8192, max_num_seqs=8)
    return serving(built.engine, built.tokenizer)


def test_clients_that_vanish_leave_no_slot_or_page_behind(serving, nano_dir: Path) -> None:
    with _model(serving, nano_dir) as server:
        _check_vanishing(server, 30, 12)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_1000_clients_that_vanish_leave_no_slot_or_page_behind(serving, nano_dir: Path) -> None:
    with _model(serving, nano_dir) as server:
        _check_vanishing(server, 1000, 40)
