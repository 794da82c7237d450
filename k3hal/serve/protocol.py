"""HTTP connections with an end to everything a client may leave unfinished."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _HeadTooLargeError(Exception):
    """Makes the parser stop."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which itself bounds neither a request's head nor how long a client may not read.

    A head of more than `head_bytes`, or one that is not there `head_timeout` seconds after it began (or after the
    connection did), is refused. A client that reads nothing for `write_timeout` seconds while there is something for
    it is dropped: the connection is lost, which aborts what it asked for.
    """

    head_bytes: ClassVar[int] = 65536
    head_timeout: ClassVar[float] = 30.0
    write_timeout: ClassVar[float] = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._read = 0  # bytes of reads that hold nothing but the head, which the parser may not have told of yet
        self._head = 0  # bytes the parser has told of
        self._message_ended = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._message_ended = False
        super().data_received(data)
        if self._in_head and not self._message_ended:
            self._read += len(data)
            if self._read > self.head_bytes:
                self._refuse(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        if self._head > self.head_bytes:
            self._refuse(_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._read = self._head = 0
        if self._head_timer is None:
            self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._message_ended = True
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self.head_bytes:
            raise _HeadTooLargeError

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self._refuse, _TOO_SLOW)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, answer: bytes) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(answer)
            self.transport.close()
        else:  # an earlier request of this connection is being answered: no place for another answer
            self.transport.abort()


def bounded(head_timeout: float, write_timeout: float) -> type[BoundedProtocol]:
    """The protocol with these times, in seconds."""
    return type("Protocol", (BoundedProtocol,), {"head_timeout": head_timeout, "write_timeout": write_timeout})
