"""A real server on a free port, over a replay engine, for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from k3hal.engine.replay import ReplayEngine
from k3hal.engine.replay_file import ReplayLine
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.server import Server, bind, url_of
from k3hal.serve.state import ServerConfig, ServerState
from k3hal.serve.xtml import Segment, close_tag, element, encode, open_tag
from k3hal.tokenizer import END_OF_MSG, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
JSON_TYPE = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]


@dataclass
class RunningServer:
    url: str
    server: Server
    state: ServerState
    engine: ReplayEngine

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **{"headers": JSON_TYPE, **options})


@contextlib.contextmanager
def _serving(
    engine: Any, tokenizer: Tokenizer, *, tls: Any = None, traces: Any = None, **config
) -> Iterator[RunningServer]:
    """Serve `engine` on a thread of its own until the block ends."""
    settings = {"model_names": ("k3", "alias"), "warm_up": "off", **config}
    state = ServerState(engine, tokenizer, ServerConfig(**settings))
    ready = threading.Event()
    server = Server(state, announce=lambda _: ready.set(), begun=time.monotonic(), tls=tls, traces=traces)
    with bind("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="server")
        thread.start()
        try:
            assert ready.wait(60)
            yield RunningServer(url_of(sock, "https" if tls else "http"), server, state, engine)
        finally:
            state.router.abort_all()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def _running(lines: Sequence[ReplayLine], engine_limits: dict[str, int] | None = None, **options):
    return _serving(ReplayEngine(lines, TOKENIZER, **(engine_limits or {})), TOKENIZER, **options)


@pytest.fixture(scope="session")
def running(grammars: None) -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """`with running(lines, engine_limits, **config) as server`: a replay."""
    return _running


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """`with serving(engine, tokenizer, **config) as server`: any engine."""
    return _serving


@pytest.fixture(scope="session")
def turn() -> Callable[..., ReplayLine]:
    """`turn(reasoning, content, **replay fields)`: a whole well-formed answer as a replay line."""

    def make(reasoning: str, content: str, **fields) -> ReplayLine:
        segments = [Segment(reasoning), *close_tag("think"), *element("response", content), *close_tag("message")]
        ids = encode([*segments, Segment(END_OF_MSG, True)], TOKENIZER)
        return ReplayLine(tuple(ids), **fields)

    return make


@pytest.fixture(scope="session")
def calling() -> Callable[..., ReplayLine]:
    """`calling(reasoning, content, *calls, **replay fields)`: a turn that ends in calls, each a name and its arguments.

    Arguments are `{key: (type, text)}`, or one raw text.
    """

    def make(reasoning: str, content: str, *calls: tuple[str, Any], **fields) -> ReplayLine:
        parts = [Segment(reasoning), *close_tag("think"), *element("response", content), *open_tag("tools")]
        for index, (name, arguments) in enumerate(calls, start=1):
            parts += open_tag("call", ("tool", name), ("index", str(index)))
            if isinstance(arguments, str):
                parts += [*open_tag("json", ("type", "object")), Segment(arguments), *close_tag("json")]
            else:
                for key, (kind, value) in arguments.items():
                    head = open_tag("argument", ("key", key), ("type", kind))
                    parts += [*head, Segment(value), *close_tag("argument")]
            parts += close_tag("call")
        parts += [*close_tag("tools"), *close_tag("message"), Segment(END_OF_MSG, True)]
        return ReplayLine(tuple(encode(parts, TOKENIZER)), **fields)

    return make


@pytest.fixture(scope="session")
def plain() -> Callable[..., ReplayLine]:
    """`plain(text, **replay fields)`: ordinary text as a replay line, without an end token."""
    return lambda text, **fields: ReplayLine(tuple(TOKENIZER.encode_ordinary(text)), **fields)


class Script(Sequence):
    """Replay lines that are used up in order, so that a test sets just the answers it is about to ask for."""

    def __init__(self):
        self.lines = deque()

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.lines.popleft()


class Scripted:
    """A server whose next answers a test sets."""

    def __init__(self, server, script):
        self.server = server
        self._script = script
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.http = server.client()

    def script(self, *lines):
        """The answers of the next sequences, one each."""
        self._script.lines = deque(lines)

    def stream(self, **body):
        """The chunks of a streamed chat, checked to end as a stream must."""
        response = self.http.post("/v1/chat/completions", json={"messages": HI, "stream": True, **body})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
        assert events[-1] == "[DONE]"
        return [json.loads(part) for part in events[:-1]]


@pytest.fixture(scope="session")
def grammars() -> None:
    """Loads the grammar compiler, which on a busy machine takes longer than a client of these tests waits."""
    import xgrammar  # noqa: F401


@pytest.fixture(scope="session")
def api(grammars: None) -> Iterator[Scripted]:
    """A server with a context of 2000 tokens that answers to `k3` and `alias`."""
    script = Script()
    with _running(script, {"max_model_len": 2000}) as server:
        scripted = Scripted(server, script)
        yield scripted
        scripted.http.close()
        scripted.openai.close()


class Command:
    """`k3hal` in a process of its own."""

    def __init__(self, *args):
        code = "import sys; from k3hal.cli import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def finish(self):
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.fixture(scope="session")
def k3hal() -> type[Command]:
    """`k3hal(*args)` starts the command; `finish()` waits for it and returns its exit code, output and errors."""
    return Command


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """`show(url, **context options)`: the page; at the end no script failed and nothing was asked of anybody else."""
    troubles: list[str] = []
    contexts: list[Any] = []

    def opened(url: str, **options: Any) -> Any:
        context = browser.new_context(reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        # The browser's own note on a refusal, which the tests that provoke one look at in the page.
        expected = ("Failed to load resource: the server responded", "Failed to load resource: net::ERR")
        page.on("console", lambda note: None if note.text.startswith(expected) else troubles.append(note.text))
        page.on("request", lambda request: None if request.url.startswith(url) else troubles.append(request.url))
        page.goto(url)
        page.wait_for_selector("#model:not(:empty)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []
