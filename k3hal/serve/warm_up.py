"""What a server tries before it says it is ready: that a process started does not mean that traffic will fit."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from k3hal.serve.auth import INTERNAL
from k3hal.serve.chat_prompt import render_chat
from k3hal.serve.state import ServerState

_LOG = logging.getLogger("k3hal.serve")
_HELLO = [{"role": "user", "content": "Hello"}]
_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
_TOKENS = 4

Case = tuple[str, str, dict[str, Any], int]
"""A name, a path, a body, and how many such requests run at once."""


class WarmUpError(Exception):
    """A request of the warm-up was not answered as it must be."""


async def warm_up(state: ServerState, app: ASGIApp) -> None:
    """Ask what clients will ask, through the application itself; only if all is answered is the server ready.

    If not, the server stays unready and its log says why. Keys and limits do not apply.
    """
    for name, path, body, copies in _cases(state):
        begun = time.monotonic()
        try:
            await asyncio.gather(*(_ask(app, path, body) for _ in range(copies)))
        except WarmUpError as error:
            _LOG.error("the warm-up failed at %s, so the server is not ready: %s", name, error)
            return
        _LOG.info("warm-up: %s in %.2f s", name, time.monotonic() - begun)
    state.warmed_up()


def _cases(state: ServerState) -> Iterator[Case]:
    """Quick is a short chat. Full also has the shapes that need the most: see docs/serving.md."""
    if state.config.warm_up == "off":
        return
    chat, info = "/v1/chat/completions", state.engine.info
    short = {"messages": _HELLO, "max_tokens": _TOKENS, "stream": True}
    word = state.tokenizer.encode_ordinary("Hello")[:1]
    if len(render_chat(short, state.config.thinking).ids(state.tokenizer)) + _TOKENS > info.max_model_len:
        yield "a short prompt, as no chat fits", "/v1/completions", {"prompt": word, "max_tokens": 1, "stream": True}, 1
        return
    yield "a short chat", chat, short, 1
    if state.config.warm_up == "quick":
        return
    length = min(2 * info.max_num_batched_tokens + 1, info.max_model_len - _TOKENS)
    long = {"prompt": word * length, "max_tokens": _TOKENS, "stream": True}
    yield f"a prompt of {length} tokens, in chunks", "/v1/completions", long, 1
    yield "the same prompt, found in the cache", "/v1/completions", long, 1
    yield f"{info.max_num_seqs} chats at once", chat, short | {"ignore_eos": True}, info.max_num_seqs
    yield "a chat with tools", chat, short | {"tools": [_TOOL]}, 1
    yield "a chat that answers in JSON", chat, short | {"response_format": {"type": "json_object"}}, 1


async def _ask(app: ASGIApp, path: str, body: dict[str, Any]) -> None:
    """One streamed request. Raises `WarmUpError` unless its answer is 200 and ends as a stream must."""
    sent: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    status = 0
    tail = b""

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # never leaves before its answer is complete
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, tail
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            tail = (tail + message.get("body", b""))[-2000:]

    await app(_scope(path), receive, send)
    if status != 200 or not tail.endswith(b"data: [DONE]\n\n"):
        raise WarmUpError(f"{status} {tail.decode(errors='replace')[-300:]}".replace("\n", " "))


def _scope(path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"x-request-id", b"warm-up"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        INTERNAL: True,
    }
