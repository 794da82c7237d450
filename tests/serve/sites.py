"""A server on this machine whose answers a test writes byte by byte, as hosts of other names reach it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

Answer = bytes | Callable[[socket.socket], None]


class Site:
    """Answers the path `/NAME` with the answer of that name, and notes the heads of what it was asked."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.answers: dict[str, Answer] = {}
        self.heads: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._left.set()
        with contextlib.suppress(OSError):  # closing alone leaves the thread in `accept`, on a number used again
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """For an answer that takes its time, but not beyond the test."""
        self._left.wait(seconds)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    def _serve(self) -> None:
        while True:
            try:
                peer = self._socket.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):  # many tests make the client leave early
            stream = peer if self._tls is None else self._tls.wrap_socket(peer, server_side=True)
            head = stream.recv(65536).decode("latin-1")
            self.heads.append(head)
            if not head.startswith("GET /"):
                return
            answer = self.answers[head.split(" ")[1].partition("?")[0].removeprefix("/")]
            if callable(answer):
                answer(stream)
            else:
                stream.sendall(answer)
            stream.close()


def http(body: bytes, *headers: str, status: str = "200 OK", length: bool = True) -> bytes:
    """An answer of HTTP/1.1."""
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if length else []), "", ""]
    return "\r\n".join(lines).encode() + body
