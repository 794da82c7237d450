"""Fetching the images that a request names by their URL, without ever reaching into the server's own network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from k3hal import __version__
from k3hal.errors import RequestError
from k3hal.serve.media.addresses import is_public
from k3hal.serve.media.reply import Reply, ReplyError
from k3hal.serve.media.rules import MAX_REDIRECTS, MediaRules
from k3hal.serve.media.urls import RemoteUrl, redirected, too_large

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_PIECE = 64 * 1024
_AT_ONCE = 16
"""Fetches of the whole server; the others wait, which counts to their time."""
_ADDRESSES = 3
"""Of a host that are tried."""


@dataclass(slots=True)
class _Budget:
    """Bytes that the images of one request may still take."""

    left: int


class MediaFetcher:
    """Fetches images by the server's rules.

    A host is looked up once, every address it has must be public, and one of those is connected to, so that no second
    look-up can lead elsewhere. Proxies of the environment are not used: they would do the looking up.
    """

    def __init__(
        self,
        rules: MediaRules,
        *,
        resolve: Resolve | None = None,
        public: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`resolve` gives the addresses of a host and port; `tls` is whose certificates are trusted."""
        self.rules = rules
        self._resolve = resolve or _system_resolve
        self._public = public
        self._tls = tls
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, wanted: Mapping[RemoteUrl, str]) -> dict[RemoteUrl, bytes]:
        """The bytes of each URL. Raises `RequestError` naming the first of the fields in `wanted` that failed."""
        budget = _Budget(self.rules.max_total_bytes)
        work = (self._one(remote, param, budget) for remote, param in wanted.items())
        results = await asyncio.gather(*work, return_exceptions=True)
        out: dict[RemoteUrl, bytes] = {}
        for remote, result in zip(wanted, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            out[remote] = result
        return out

    async def _one(self, remote: RemoteUrl, param: str, budget: _Budget) -> bytes:
        try:
            async with asyncio.timeout(self.rules.timeout), self._slots:
                return await self._follow(remote, param, budget)
        except TimeoutError:
            why = f"it took more than {self.rules.timeout:g} s"
        except ReplyError as error:
            why = str(error)
        except ssl.SSLError:
            why = "no secure connection came about"
        except OSError:
            why = "the connection failed"
        raise RequestError(f"{param} cannot be fetched from {remote.authority:.100}: {why}", param=param)

    async def _follow(self, remote: RemoteUrl, param: str, budget: _Budget) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            reply = await self._get(remote, param, budget)
            if reply.status == 200:
                return bytes(reply.body)
            location = reply.headers.get("location")
            if reply.status not in _REDIRECTS or not location:
                raise ReplyError(f"it answered {reply.status}")
            remote = redirected(remote, location, param, self.rules)
        raise ReplyError(f"it led elsewhere more than {MAX_REDIRECTS} times")

    async def _get(self, remote: RemoteUrl, param: str, budget: _Budget) -> Reply:
        """The whole answer if it is one of status 200, else its head."""
        reader, writer = await self._connect(remote)
        try:
            writer.write(_request(remote))
            reply = Reply()
            while not reply.complete:
                before = len(reply.body)
                reply.feed(await reader.read(_PIECE))
                if reply.has_head and reply.status != 200:
                    break
                if reply.encoded:
                    raise ReplyError("it sent a packed answer that was not asked for")
                budget.left -= len(reply.body) - before
                if max(len(reply.body), reply.length) > self.rules.max_bytes:
                    raise too_large(param, self.rules)
                if budget.left < 0:
                    most = self.rules.max_total_bytes
                    raise RequestError(f"{param}: the images to fetch have more than {most} bytes", param=param)
            return reply
        finally:
            writer.transport.abort()

    async def _connect(self, remote: RemoteUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to one of the host's addresses, all of which must be public."""
        try:
            addresses = await self._resolve(remote.host, remote.port)
        except OSError:
            raise ReplyError("the host cannot be found") from None
        if not addresses:
            raise ReplyError("the host has no address")
        if not all(map(self._public, addresses)):
            raise ReplyError("the host has an address that is not public")
        secure = {"ssl": self._context(), "server_hostname": remote.host} if remote.scheme == "https" else {}
        *others, last = addresses[:_ADDRESSES]
        for address in others:
            with contextlib.suppress(OSError):  # the next one may answer
                return await asyncio.open_connection(address, remote.port, **secure)
        return await asyncio.open_connection(last, remote.port, **secure)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _request(remote: RemoteUrl) -> bytes:
    head = [
        f"GET {remote.target} HTTP/1.1",
        f"Host: {remote.authority}",
        f"User-Agent: k3hal/{__version__}",
        "Accept: image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii")


async def _system_resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
