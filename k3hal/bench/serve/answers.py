"""Makes sense of the bytes of an answer: HTTP, chunks, server-sent events, and when each piece of text came."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import orjson

from k3hal.bench.serve.client import Exchange


@dataclass(slots=True)
class Answer:
    """What one request got; times are seconds since the start of the run.

    `error` is empty for an answer that came whole: status 200, a finish reason, and `[DONE]`. `at[i]` is when the piece
    `texts[i]` (thinking or content) came, `end` when the last chunk of the answer itself did. Tokens are the server's
    own count, or the number of pieces where it gives none.
    """

    due: float
    free: float
    sent: float
    status: int = 0
    error: str = ""
    at: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def ttft(self) -> float:
        """Seconds to the first piece; to the end where the answer has no text."""
        return (self.at[0] if self.at else self.end) - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        return (self.end - self.at[0]) / (self.output_tokens - 1) if self.output_tokens > 1 and self.at else None

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.end - self.sent

    @property
    def late(self) -> float:
        """Seconds by which the client sent it later than it could have."""
        return self.sent - max(self.due, self.free)


def read_answer(exchange: Exchange) -> Answer:
    """The answer that an exchange's bytes are."""
    answer = Answer(exchange.due, exchange.free, exchange.sent)
    try:
        _read(answer, exchange)
    except _BrokenError as broken:
        answer.error = str(broken)
    # Whatever was understood, a connection that broke is the better explanation.
    if exchange.broken and (answer.error or not answer.end):
        answer.error = exchange.broken
    return answer


class _BrokenError(Exception):
    """An answer that is not whole; the text says why."""


def _read(answer: Answer, exchange: Exchange) -> None:
    raw = b"".join(exchange.parts)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise _BrokenError("the connection closed without an answer")
    lines = head.split(b"\r\n")
    words = lines[0].split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        raise _BrokenError("the answer is not HTTP")
    answer.status = int(words[1])
    chunked = any(line.lower().replace(b" ", b"") == b"transfer-encoding:chunked" for line in lines[1:])
    start = len(head) + len(separator)
    pieces = _dechunk(raw, start) if chunked else [(raw[start:], len(raw))]
    if answer.status != 200:
        raise _BrokenError(_refusal(answer.status, b"".join(data for data, _ in pieces)))
    ends = list(accumulate(map(len, exchange.parts)))
    _read_events(answer, pieces, ends, exchange.at)


def _dechunk(raw: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Each chunk's data and the position in `raw` after it."""
    while True:
        line = raw.find(b"\r\n", start)
        try:
            size = int(raw[start:line].split(b";")[0], 16) if line >= 0 else -1
        except ValueError:
            size = -1
        if size < 0 or len(raw) < line + 2 + size + 2:
            raise _BrokenError("the answer is cut off")
        if size == 0:
            return
        end = line + 2 + size
        yield raw[line + 2 : end], end
        start = end + 2


def _read_events(answer: Answer, pieces: Iterable[tuple[bytes, int]], ends: list[int], at: list[float]) -> None:
    done = finished = False
    for event, position in _events(pieces):
        if event == b"[DONE]":
            done = True
            continue
        try:
            chunk = orjson.loads(event)
        except orjson.JSONDecodeError:
            raise _BrokenError("an event is not JSON") from None
        if not isinstance(chunk, dict) or "error" in chunk:
            raise _BrokenError(f"stream error: {_message(chunk)}")
        try:
            finished |= _take(answer, chunk, at[bisect_left(ends, position)])
        except (KeyError, TypeError, AttributeError):
            raise _BrokenError("an event is not a chunk of a completion") from None
    if not done or not finished:
        raise _BrokenError("the stream is cut off")
    answer.output_tokens = answer.output_tokens or len(answer.at)


def _events(pieces: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """The data of each event and the position after the piece that completed it. Comments are left out."""
    held = b""
    for data, position in pieces:
        held += data
        *whole, held = held.split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip(), position


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> bool:
    """Note a chunk that came at `now`; whether it says why the answer ended."""
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    finished = False
    for choice in chunk.get("choices") or ():
        answer.end = now
        delta = choice.get("delta") or {}
        thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = thinking + (delta.get("content") or choice.get("text") or "")
        if text:
            answer.at.append(now)
            answer.texts.append(text)
        finished |= choice.get("finish_reason") is not None
    return finished


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_message(orjson.loads(body))}"
    except orjson.JSONDecodeError:
        return f"HTTP {status}"


def _message(value: Any) -> str:
    """The message of an error in OpenAI's form, whatever is really there; short enough for a table."""
    error = value.get("error", value) if isinstance(value, dict) else value
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200]
