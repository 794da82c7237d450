"""Running the application on a socket: announcing readiness, and draining on the first signal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from k3hal.errors import UsageError
from k3hal.serve.app import create_app
from k3hal.serve.protocol import bounded
from k3hal.serve.state import ServerState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# After running requests are aborted, how long their last words may take.
_ABORT_GRACE = 5.0


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to `host:port` (0 picks a free port). Raises `UsageError` if that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}", hint="choose another --host or --port") from None
    return sock


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(certificate: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """A context for servers; with `client_ca`, clients must show a certificate of it. Raises `UsageError`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password="")  # never ask for one on the terminal
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        files = ", ".join(str(file) for file in (certificate, key, client_ca) if file is not None)
        raise UsageError(f"TLS cannot be set up with {files}: {reason}") from None
    return context


class Server(uvicorn.Server):
    """A uvicorn server whose first SIGTERM or SIGINT drains: not ready, then no new requests, running ones finish.

    They have `drain_timeout` seconds; then they are aborted. A second signal aborts at once.
    """

    def __init__(
        self,
        state: ServerState,
        announce: Callable[[str], None],
        begun: float,
        *,
        tls: ssl.SSLContext | None = None,
        traces: TracerProvider | None = None,
    ) -> None:
        """`announce` takes the line that says where and since when; `begun` is the monotonic time of the start."""
        config = state.config
        super().__init__(
            uvicorn.Config(
                create_app(state, traces),
                http=bounded(config.head_timeout, config.write_timeout),
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="on",
                timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=int(_ABORT_GRACE),
                ssl_context_factory=None if tls is None else lambda _, __: tls,
            )
        )
        self._scheme = "http" if tls is None else "https"
        self._state = state
        self._announce = announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = begun
        self._hurry = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the signal handler, so it only wakes the loop."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Start shutting down; called again, stop waiting for anything."""
        if self._state.leaving:
            self._hurry.set()
            self._state.drain()
            self._state.router.abort_all()
            return
        self._state.leave()
        self._spawn(self._drain())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._spawn(self._announce_ready(sockets or []))

    async def _announce_ready(self, sockets: list[socket.socket]) -> None:
        while not self._state.ready:
            if self._state.leaving:
                return
            await asyncio.sleep(0.02)
        where = ", ".join(url_of(sock, self._scheme) for sock in sockets)
        names = ", ".join(self._state.config.model_names)
        self._announce(f"k3hal: serving {names} on {where} (ready after {time.monotonic() - self._begun:.1f} s)")

    async def _drain(self) -> None:
        router = self._state.router
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._state.config.drain_delay)
        self._state.drain()
        if not await router.wait_idle(self._state.config.drain_timeout):
            router.abort_all()
            await router.wait_idle(_ABORT_GRACE)
        self.should_exit = True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
