"""The bound on a request's head, however its bytes arrive."""

import asyncio
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from k3hal.serve.protocol import bounded

LIMIT = 65536
SLACK = 64  # what of a head is not part of its URL and headers


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def statuses(pieces):
    """The statuses of the answers that a connection gets on which `pieces` arrive, each in one read."""

    async def talk():
        config = uvicorn.Config(app, http=bounded(30, 60), lifespan="off", log_config=None, access_log=False)
        config.load()
        kind: Any = config.http_protocol_class
        protocol = kind(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
        wire = Wire()
        protocol.connection_made(wire)
        for piece in pieces:
            if not wire.closed:
                protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return wire.written

    written = asyncio.run(talk())
    return [int(answer.split()[0]) for answer in written.split(b"HTTP/1.1 ")[1:]]


def cut(data, places):
    places = sorted({place % len(data) for place in places})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]


def head(size, kind):
    """A GET's head of `size` bytes: one long header, many of them, or a long URL."""
    start, end = b"GET /%b HTTP/1.1\r\n", b"\r\n"
    if kind == "url":
        return start % (b"a" * (size - len(start) + 2 - len(end))) + end
    rest = size - len(start % b"") - len(end)
    if kind == "one":
        return start % b"" + b"x: " + b"y" * (rest - 5) + b"\r\n" + end
    lines = b"x: yyyy\r\n" * (rest // 9 - 1)
    return start % b"" + lines + b"x: " + b"y" * (rest - len(lines) - 5) + b"\r\n" + end


@pytest.mark.parametrize("kind", ["one", "many", "url"])
@settings(max_examples=15, deadline=None)
@given(size=st.sampled_from([1000, LIMIT - 1, LIMIT, LIMIT + SLACK, 70_000, 200_000]), places=st.lists(st.integers(0)))
def test_a_head_is_bounded_however_it_arrives(kind, size, places):
    data = head(size, kind)
    assert len(data) == size
    assert statuses(cut(data, places)) == [200 if size <= LIMIT else 431]


def test_a_head_without_end_is_refused_at_once():
    assert statuses([b"GET / HTTP/1.1\r\nx: " + b"y" * LIMIT]) == [431]
    assert statuses([b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, b"y" * 40_000]) == [431]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0)))
def test_bodies_and_the_heads_before_are_not_counted(places):
    post = b"POST / HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"b" * 200_000
    assert statuses(cut(post + head(60_000, "many") + head(60_000, "one"), places)) == [200] * 3
