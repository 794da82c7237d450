"""One request from the command line: its body from the flags, and its answer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3hal.errors import InputError, K3HALError, RequestError
from k3hal.offline.settings import CHAT, COMPLETION, Endpoint, GenerateSettings
from k3hal.offline.text import AnswerPrinter, note


def request_of(settings: GenerateSettings) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint and the body that the flags ask for. Raises `InputError` for a file that holds no request."""
    if settings.prompt is not None:
        return COMPLETION, {"prompt": _text(settings.prompt), **settings.fields(COMPLETION)}
    if settings.chat is not None:
        return CHAT, {"messages": [{"role": "user", "content": _text(settings.chat)}], **settings.fields(CHAT)}
    assert settings.messages is not None
    return CHAT, {**_read_messages(settings.messages), **settings.fields(CHAT)}


def answer(settings: GenerateSettings, *, as_json: bool) -> dict[str, Any] | None:
    """Run the request that `settings` describe: the API's answer with `as_json`, else its text is printed.

    Raises what loading the model raises, `RequestError` for a refused request and `K3HALError` when the engine fails.
    """
    endpoint, body = request_of(settings)
    return asyncio.run(_answer(settings, endpoint, body, as_json=as_json))


async def _answer(
    settings: GenerateSettings, endpoint: Endpoint, body: Mapping[str, Any], *, as_json: bool
) -> dict[str, Any] | None:
    from k3hal.offline.local_server import local_server

    async with local_server(settings) as server:
        begun = time.monotonic()
        live = sys.stdout.isatty() if settings.stream is None else settings.stream
        if live and not as_json and body.get("n") in (None, 1):
            printers, usage = [AnswerPrinter()], {}
            async for chunk in server.stream(endpoint, {**body, "stream_options": {"include_usage": True}}):
                _raise_if_error(chunk)
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    printers[0].add(choice)
            printers[0].end()
        else:
            _, value = await server.post(endpoint, body)
            _raise_if_error(value)
            if as_json:
                return value
            usage, printers = value["usage"], _print_whole(value["choices"])
        _print_summary(usage, [printer.finish_reason for printer in printers], time.monotonic() - begun)
    return None


def _print_whole(choices: list[dict[str, Any]]) -> list[AnswerPrinter]:
    printers = []
    for choice in choices:
        if len(choices) > 1:
            note(f"--- {choice['index']}")
        printer = AnswerPrinter()
        printer.add(choice)
        printer.end()
        printers.append(printer)
    return printers


def _print_summary(usage: Mapping[str, Any], ends: list[str], seconds: float) -> None:
    tokens = usage["completion_tokens"]
    note(
        f"k3hal: {tokens} tokens after a prompt of {usage['prompt_tokens']}, ended by {', '.join(ends)}, "
        f"in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"
    )


def _raise_if_error(answer: Mapping[str, Any]) -> None:
    error = answer.get("error")
    if error is None:
        return
    if error["type"] == "invalid_request_error":
        raise RequestError(error["message"], param=error["param"])
    raise K3HALError(error["message"])


def _text(value: str) -> str:
    """A flag's text; `-` reads it from standard input."""
    source = "standard input" if value == "-" else "the text"
    data = sys.stdin.buffer.read() if value == "-" else os.fsencode(value)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_messages(path: Path) -> dict[str, Any]:
    """A chat request's body, or the bare list of its messages."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or "messages" not in value:
        raise InputError(f"{path} holds no chat", hint='it is a request body with "messages", or their list')
    if value.get("stream"):
        raise InputError(f'{path}: "stream" is for the HTTP API', hint="leave it out and use --stream")
    return value
