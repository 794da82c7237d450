"""An HTTP answer that carries an image, received piece by piece within bounds."""

from __future__ import annotations

import httptools

MAX_HEAD = 64 * 1024
"""Bytes of an answer's status line and headers."""


class ReplyError(Exception):
    """An answer that is of no use; the text says what is wrong with it."""


class Reply:
    """A reader of one answer to a GET. `body` grows as data is fed."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._fed = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.has_head = False
        self.complete = False

    def feed(self, data: bytes) -> None:
        """Take what came; empty data is the end of the connection. Raises `ReplyError`."""
        if not data:
            self._end()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise ReplyError("its answer is no HTTP") from None
        if not self.has_head:
            self._fed += len(data)
            if self._fed > MAX_HEAD:
                raise ReplyError("the head of its answer is too long")

    @property
    def length(self) -> int:
        """Bytes the body is said to have; 0 where that is not said."""
        said = self.headers.get("content-length", "")
        return int(said) if said.isascii() and said.isdecimal() and len(said) < 20 else 0

    @property
    def encoded(self) -> bool:
        """Whether the body is not as it is but packed, which was not asked for."""
        return self.headers.get("content-encoding", "identity").lower() != "identity"

    def _end(self) -> None:
        """A body without a length ends with its connection."""
        if not self.has_head or "content-length" in self.headers or "transfer-encoding" in self.headers:
            raise ReplyError("its answer was cut off")
        self.complete = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self.has_head = status, True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.has_head:
            self.complete = True
        else:  # an interim answer: the one that counts follows
            self.headers.clear()
