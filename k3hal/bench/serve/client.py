"""Sends requests when they are due and keeps what came back with the moment it came.

Nothing is read while the load runs: per piece of an answer the client takes the time and appends two references, so
that it measures the server and not itself. `answers` makes sense of the bytes afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from k3hal.bench.serve.dataset import Planned
from k3hal.bench.serve.options import ServeBench
from k3hal.errors import UsageError


@dataclass(slots=True)
class Exchange:
    """One request as it went. Times are seconds since the start of the run.

    `free` is when a slot under `concurrency` was there (0 without such a limit), `sent` when the client really began to
    connect. `at[i]` is when the bytes `parts[i]` arrived. `broken` says why the connection did not come to its end.
    """

    due: float
    free: float = 0.0
    sent: float = 0.0
    at: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    broken: str = ""


@dataclass(slots=True)
class Progress:
    """What a display may look at while the load runs."""

    total: int
    begun: int = 0
    done: int = 0


class Target:
    """Where requests go: the address is looked up once, by connecting to it. Raises `UsageError` if nobody answers."""

    def __init__(self, base_url: str, endpoint: str, api_key: str | None) -> None:
        parts = urlsplit(base_url)
        self.name = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            with socket.create_connection((self.name, self.port), timeout=10) as sock:
                self.address = str(sock.getpeername()[0])
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"--base-url {base_url}: cannot connect: {reason}", hint="is the server up?") from None
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path.rstrip('/')}{endpoint} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n{key}"
            "Content-Type: application/json\r\nConnection: close\r\nContent-Length: "
        ).encode()

    def message(self, body: bytes) -> bytes:
        """The bytes of a request. The server closes the connection after its answer, which is how the end is known."""
        return self._head + str(len(body)).encode() + b"\r\n\r\n" + body


class _Connection(asyncio.Protocol):
    """Sends one message and notes what comes."""

    def __init__(self, message: bytes, exchange: Exchange, origin: float) -> None:
        self._message = message
        self._exchange = exchange
        self._origin = origin
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._exchange.at.append(time.perf_counter() - self._origin)
        self._exchange.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._exchange.broken = f"connection lost: {exc}"
        if not self.closed.done():
            self.closed.set_result(None)


@dataclass(frozen=True, slots=True)
class Load:
    """A finished run: how long it took and how much processor time the client used, both in seconds."""

    exchanges: list[Exchange]
    seconds: float
    cpu: float


async def run_load(
    target: Target,
    planned: Sequence[Planned],
    bodies: Iterator[bytes],
    settings: ServeBench,
    watch: Callable[[Progress], contextlib.AbstractAsyncContextManager[None]],
) -> Load:
    """Send every request at its time, whether or not earlier ones are answered, and wait for all of them."""
    progress = Progress(len(planned))
    slots = None if settings.concurrency is None else asyncio.Semaphore(settings.concurrency)
    exchanges = [Exchange(request.due) for request in planned]
    tasks: list[asyncio.Task[None]] = []
    with _no_collection():
        cpu, origin = time.process_time(), time.perf_counter()
        async with watch(progress):
            for exchange, body in zip(exchanges, bodies, strict=True):
                wait = exchange.due - (time.perf_counter() - origin)
                # Also when late, so that answers are noted as they come and not after a burst of requests.
                await asyncio.sleep(max(0.0, wait))
                if slots is not None:
                    await slots.acquire()
                    exchange.free = time.perf_counter() - origin
                work = _exchange(target, target.message(body), exchange, origin, settings.timeout)
                tasks.append(asyncio.create_task(_one(work, slots, progress)))
            await asyncio.gather(*tasks)
        return Load(exchanges, time.perf_counter() - origin, time.process_time() - cpu)


async def _one(work: Coroutine[Any, Any, None], slots: asyncio.Semaphore | None, progress: Progress) -> None:
    progress.begun += 1
    try:
        await work
    finally:
        progress.done += 1
        if slots is not None:
            slots.release()


async def _exchange(target: Target, message: bytes, exchange: Exchange, origin: float, timeout: float) -> None:
    exchange.sent = time.perf_counter() - origin
    transport = None
    try:
        async with asyncio.timeout(timeout):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(message, exchange, origin),
                target.address,
                target.port,
                ssl=target.tls,
                server_hostname=target.name if target.tls else None,
            )
            await connection.closed
    except TimeoutError:
        exchange.broken = f"no end within {timeout:g} s"
    except OSError as error:
        exchange.broken = f"cannot connect: {error.strerror or error}"
    finally:
        if transport is not None:
            transport.abort()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would stop the client for milliseconds; nothing here makes cycles."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
