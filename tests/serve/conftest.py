"""A real server on a free port, over a replay engine, for the tests of this folder."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import pytest

from k3hal.engine.replay import ReplayEngine
from k3hal.engine.replay_file import ReplayLine
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.server import Server, bind, url_of
from k3hal.serve.state import ServerConfig, ServerState
from k3hal.serve.xtml import Segment, close_tag, element, encode
from k3hal.tokenizer import END_OF_MSG, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())


@dataclass
class RunningServer:
    url: str
    server: Server
    state: ServerState
    engine: ReplayEngine

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)


@contextlib.contextmanager
def _running(lines: Sequence[ReplayLine], limits: dict[str, int] | None = None, **config) -> Iterator[RunningServer]:
    """Serve `lines` on a thread of its own until the block ends."""
    engine = ReplayEngine(lines, TOKENIZER, **(limits or {}))
    state = ServerState(engine, TOKENIZER, ServerConfig(model_names=("k3", "alias"), warm_up=False, **config))
    ready = threading.Event()
    server = Server(state, lambda _: ready.set())
    with bind("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="server")
        thread.start()
        try:
            assert ready.wait(20)
            yield RunningServer(url_of(sock), server, state, engine)
        finally:
            state.router.abort_all()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def running() -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """`with running(lines, limits, **config) as server`."""
    return _running


@pytest.fixture(scope="session")
def turn() -> Callable[..., ReplayLine]:
    """`turn(reasoning, content, **replay fields)`: a whole well-formed answer as a replay line."""

    def make(reasoning: str, content: str, **fields) -> ReplayLine:
        segments = [Segment(reasoning), *close_tag("think"), *element("response", content), *close_tag("message")]
        ids = encode([*segments, Segment(END_OF_MSG, True)], TOKENIZER)
        return ReplayLine(tuple(ids), **fields)

    return make


@pytest.fixture(scope="session")
def plain() -> Callable[..., ReplayLine]:
    """`plain(text, **replay fields)`: ordinary text as a replay line, without an end token."""
    return lambda text, **fields: ReplayLine(tuple(TOKENIZER.encode_ordinary(text)), **fields)
