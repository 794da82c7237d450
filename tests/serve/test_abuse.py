"""Mixed abuse of a server: each misuse gets its status or a closed connection, never a 500; good clients an answer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from k3hal.bench.serve.process import ServerProcess, own_server
from k3hal.model.synthetic_vocab import synthetic_ranks, synthetic_vocab_bytes
from k3hal.tokenizer import Tokenizer

TEXT = "All work and no play makes Jack a dull boy. " * 20
CLOSED = 0
"""Stands for a connection that ended without a status."""

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
MOST = 4 << 20
"""Bytes of body that the server takes."""

GROWTH = 16e6
"""Bytes by which the server's memory may end above where the heaviest misuses alone have brought the allocator."""


@dataclass
class Client:
    """One abuser's tools. Statuses are those of the answers, `CLOSED` without one."""

    host: str
    port: int
    rng: np.random.Generator

    async def send(self, raw: bytes, *, limit: int | None = None) -> tuple[int, bytes]:
        """Send bytes, read the answer to its end (or `limit` bytes of it): status and everything that came."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        got = b""
        try:
            writer.write(raw)
            async with asyncio.timeout(60):
                while chunk := await reader.read(65536):
                    got += chunk
                    if limit is not None and len(got) >= limit:
                        break
        except ConnectionError:
            pass  # a server may close on what it will not read; what it said before counts
        finally:
            writer.transport.abort()
        words = got.split(b" ", 2)
        return (int(words[1]) if len(words) > 1 and words[1].isdigit() else CLOSED), got

    async def post(self, path: str, body: bytes, *, more: str = "", limit: int | None = None) -> tuple[int, bytes]:
        """Send a body as JSON."""
        return await self.send(_head("POST", path, len(body), more) + body, limit=limit)


def _head(method: str, path: str, length: int | str, more: str = "") -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{more}"
    return f"{lines}Content-Length: {length}\r\n\r\n".encode()


Misuse = Callable[[Client], Awaitable[int]]


async def good(client: Client) -> int:
    """Not a misuse: the answer must be right, whatever else goes on."""
    status, raw = await client.post(TEXTS, json.dumps({"prompt": "x", "max_tokens": 400}).encode())
    answer = json.loads(raw.partition(b"\r\n\r\n")[2])
    text = answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 400 and len(text) > 400 and (TEXT * 3).startswith(text)
    return status


async def bad_json(client: Client) -> int:
    bodies = [
        b"{",
        b'{"messages": [',
        b"[" * 100_000,
        b"nul",
        b'{"a":' * 5000,
        b'{"messages": [] "x"}',
        b"[1]",
        b'"x"',
        b"",
    ]
    return (await client.post(CHAT, bodies[client.rng.integers(len(bodies))]))[0]


async def bad_utf8(client: Client) -> int:
    bodies = [b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xc3"}', b'{"\xed\xa0\x80": 1}', b'{"prompt": "\\ud800"}']
    return (await client.post(TEXTS, bodies[client.rng.integers(len(bodies))]))[0]


async def wrong_types(client: Client) -> int:
    bodies = [
        {"messages": 3},
        {"messages": [{"role": "user", "content": {"a": [1] * 50}}]},
        {"messages": [None] * 500},
        {**HI, "max_tokens": "many"},
        {**HI, "temperature": -1},
        {**HI, "n": 10**9},
        {**HI, "stop": ["x"] * 10_000},
        {**HI, "tools": [{"type": "function"}]},
    ]
    return (await client.post(CHAT, json.dumps(bodies[client.rng.integers(len(bodies))]).encode()))[0]


async def long_prompt(client: Client) -> int:
    """Longer than the context."""
    return (await client.post(CHAT, json.dumps({"messages": [{"role": "user", "content": "x" * 300_000}]}).encode()))[0]


async def unknown_route(client: Client) -> int:
    paths = ["/", "/v1", "/v2/chat/completions", "/v1/chat/completions/../x", "/%00", "/v1/models/%F0%9F", "/x" * 2000]
    return (await client.post(paths[client.rng.integers(1, len(paths))], b"{}"))[0]


async def wrong_method(client: Client) -> int:
    methods = ["GET", "PUT", "DELETE", "PATCH", "BREW"]
    return (await client.send(_head(methods[client.rng.integers(len(methods))], CHAT, 0)))[0]


async def not_http(client: Client) -> int:
    junk = [
        bytes(client.rng.integers(0, 256, 400, dtype=np.uint8)) + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 30,
        b"GET\r\n\r\n",
    ]
    return (await client.send(junk[client.rng.integers(len(junk))]))[0]


async def bad_head(client: Client) -> int:
    heads = [
        _head("POST", CHAT, "-5"),
        _head("POST", CHAT, "9" * 30),
        _head("POST", CHAT, 2, "Transfer-Encoding: chunked\r\n") + b"{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 300_000,
    ]
    return (await client.send(heads[client.rng.integers(len(heads))]))[0]


async def declared_giant(client: Client) -> int:
    """A body that is said to be enormous is refused before it comes."""
    return (await client.send(_head("POST", CHAT, 10**12)))[0]


async def real_giant(client: Client) -> int:
    """One that only turns out to be too large, in chunks: refused, or the connection closed on the rest."""
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return (await client.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 6))[0]


async def half_a_body(client: Client) -> int:
    """The client leaves in the middle of what it promised."""
    _, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(_head("POST", TEXTS, 5000) + b'{"prompt": "')
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.transport.abort()
    return CLOSED


async def slow_sender(client: Client) -> int:
    """A good request, a few bytes at a time."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    body = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
    for piece in (_head("POST", TEXTS, len(body))[:40], _head("POST", TEXTS, len(body))[40:], body[:5], body[5:]):
        writer.write(piece)
        await asyncio.sleep(0.1)
    status = int((await reader.read(65536)).split(b" ")[1])
    writer.transport.abort()
    return status


async def slow_reader(client: Client) -> int:
    """Takes little of a long stream, slowly, and leaves."""
    reader, writer = await asyncio.open_connection(client.host, client.port, limit=256)
    body = json.dumps({**HI, "stream": True, "max_tokens": 2000}).encode()
    writer.write(_head("POST", CHAT, len(body)) + body)
    got = await reader.read(64)
    for _ in range(int(client.rng.integers(1, 8))):
        await asyncio.sleep(0.1)
        got += await reader.read(64)
    writer.transport.abort()
    return int(got.split(b" ")[1])


async def vanishes(client: Client) -> int:
    return (await client.post(CHAT, json.dumps({**HI, "stream": True}).encode(), limit=800))[0]


MISUSES: dict[Misuse, set[int]] = {
    good: {200},
    bad_json: {400},
    bad_utf8: {400},
    wrong_types: {400},
    long_prompt: {400},
    unknown_route: {404, 405},
    wrong_method: {405, 400},
    not_http: {400, CLOSED},
    bad_head: {400, 413, 431, CLOSED},
    declared_giant: {413},
    real_giant: {413, CLOSED},
    half_a_body: {CLOSED},
    slow_sender: {200},
    slow_reader: {200},
    vanishes: {200},
}


@dataclass
class Tally:
    """What came of the abuse: how often each misuse, and every status that it should not have got."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: Counter[tuple[str, int]] = field(default_factory=Counter)


async def abuse(
    url: str, seconds: float, at_once: int, seed: int, misuses: tuple[Misuse, ...] = tuple(MISUSES)
) -> Tally:
    """Let `at_once` abusers misuse the server for so long; each misuse is tried at least once."""
    host, port = url.removeprefix("http://").split(":")
    tally, end = Tally(), time.monotonic() + seconds
    first = list(misuses)

    async def abuser(number: int) -> None:
        client = Client(host, int(port), np.random.default_rng([seed, number]))
        while first or time.monotonic() < end:
            misuse = first.pop() if first else misuses[client.rng.integers(len(misuses))]
            status = await misuse(client)
            tally.done[misuse.__name__] += 1
            if status not in MISUSES[misuse]:
                tally.wrong[misuse.__name__, status] += 1

    await asyncio.gather(*map(abuser, range(at_once)))
    return tally


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a server that answers everything with `TEXT`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "tiktoken.model").write_bytes(synthetic_vocab_bytes())
    ids = Tokenizer(synthetic_ranks()).encode_ordinary(TEXT * 3)
    (tmp_path / "replay.jsonl").write_text(json.dumps({"ids": ids, "step_ms": 1}) + "\n")
    return [
        "--engine",
        f"replay:{tmp_path / 'replay.jsonl'}",
        "--tokenizer",
        str(tmp_path),
        "--max-model-len",
        "20000",
        "--max-body-bytes",
        str(MOST),
    ]


def test_a_short_while_of_abuse(flags: list[str]) -> None:
    with own_server(flags) as (url, _):
        tally = asyncio.run(abuse(url, 1.0, 12, seed=1))
    assert not tally.wrong and set(tally.done) == {misuse.__name__ for misuse in MISUSES}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_ten_minutes_of_abuse_leave_the_memory_as_it_was(flags: list[str]) -> None:
    with own_server(flags) as (url, pid):
        process = ServerProcess(pid)
        tallies = [asyncio.run(abuse(url, 30.0, 40, seed=99, misuses=(long_prompt, real_giant)))]
        memory = [process.memory()]
        for minute in range(10):
            tallies.append(asyncio.run(abuse(url, 60.0, 40, seed=minute)))
            memory.append(process.memory())
    print(f"server MB at the start and after each minute: {[round(size / 1e6, 1) for size in memory]}")
    print(f"done: {dict(sum((tally.done for tally in tallies), Counter()))}")
    assert not sum((tally.wrong for tally in tallies), Counter())
    assert memory[-1] - memory[0] < GROWTH
