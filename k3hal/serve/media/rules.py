"""What images a request may have, and where they may come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"(\*|(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?", re.ASCII)
PORTS = {"http": 80, "https": 443}

MAX_PIXELS = 1 << 26
"""Pixels of one image: what is much smaller encoded than decoded must not fill a machine's memory."""
MAX_URL = 8192
"""Characters of a URL that is fetched."""
MAX_REDIRECTS = 3


@dataclass(frozen=True, slots=True)
class Domain:
    """An entry of the allow-list: a host, `*.HOST` for those under it, or `*`; and a port, None for the scheme's."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Domain:
        """An entry as it is written, `HOST[:PORT]`. Raises `ValueError` saying what it should be."""
        entry = _ENTRY.fullmatch(text.lower())
        port = int(entry[2]) if entry and entry[2] else None
        if entry is None or (port is not None and not 0 < port < 65536):
            raise ValueError(f"{text!r:.100} is not HOST or HOST:PORT; *.HOST stands for the hosts under it, * for any")
        return cls(entry[1].strip("[]"), port)

    def allows(self, scheme: str, host: str, port: int) -> bool:
        """Whether it lets a URL of this scheme, host (lower case) and port be fetched."""
        if port != (self.port or PORTS[scheme]):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return self.host in ("*", host)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """The bounds of a request's images. Without `domains` nothing is fetched; `data:` URLs are always read."""

    domains: tuple[Domain, ...] = ()
    max_bytes: int = 20 * 1024 * 1024
    """Of one encoded image."""
    max_images: int = 64
    """Of one request."""
    max_total_bytes: int = 64 * 1024 * 1024
    """Of the images that are fetched for one request; the others are within the limit of its body."""
    timeout: float = 10.0
    """Seconds that fetching one image may take, from looking its host up to its last byte."""

    def allow(self, scheme: str, host: str, port: int) -> bool:
        return any(domain.allows(scheme, host, port) for domain in self.domains)
