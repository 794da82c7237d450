"""The URLs of images: `data:` ones with the image inside, and those of other servers."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from k3hal.errors import RequestError
from k3hal.serve.media.rules import MAX_URL, PORTS, MediaRules

_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_HOST = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|[0-9a-f:.]+", re.ASCII)
# What a request's head must never hold, and what a parser of URLs may quietly drop.
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """Where an image is: the one reading of a URL that is checked, looked up and asked for."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query as the request has them."""

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data(url: str, param: str, rules: MediaRules) -> bytes:
    """The bytes of a base64 `data:` URL. Raises `RequestError` naming `param`."""
    head = _DATA_URL.match(url)
    if head is None:
        raise RequestError(f"{param} must be a data:image/…;base64, URL, got {url!r:.60}", param=param)
    encoded = url[head.end() :]
    if len(encoded) * 3 // 4 > rules.max_bytes + 2:
        raise too_large(param, rules)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{param} is not valid base64", param=param) from None
    if len(data) > rules.max_bytes:
        raise too_large(param, rules)
    return data


def too_large(param: str, rules: MediaRules) -> RequestError:
    return RequestError(f"{param} has more than {rules.max_bytes} bytes, the most an image may have", param=param)


def read_remote(url: str, param: str, rules: MediaRules) -> RemoteUrl:
    """The place of an image that `rules` let be fetched. Raises `RequestError` naming `param`."""
    scheme, colon, _ = url[:32].partition(":")
    if not colon or scheme.lower() not in PORTS:
        kinds = "data:, https: or http:" if rules.domains else "data:image/…;base64,"
        raise RequestError(f"{param} must be a {kinds} URL, got {url!r:.60}", param=param)
    remote = _parse(url)
    if remote is None:
        raise RequestError(
            f"{param} is not a URL that can be fetched: it must have a host, no user or password, no spaces, "
            f"and at most {MAX_URL} characters",
            param=param,
        )
    if not rules.allow(remote.scheme, remote.host, remote.port):
        raise RequestError(
            f"{param} must be a data:image/…;base64, URL: nothing is fetched from {remote.authority:.100}, "
            "which is not among the allowed media domains",
            param=param,
        )
    return remote


def redirected(remote: RemoteUrl, location: str, param: str, rules: MediaRules) -> RemoteUrl:
    """Where `location` leads from `remote`, under the same rules. Raises `RequestError` naming `param`."""
    try:
        following = read_remote(urljoin(str(remote), location), param, rules)
    except (RequestError, ValueError):
        raise RequestError(
            f"{param} leads to another URL that is not one of the allowed media domains", param=param
        ) from None
    if remote.scheme == "https" and following.scheme != "https":
        raise RequestError(f"{param} leads from https: to http:, which is not followed", param=param)
    return following


def _parse(url: str) -> RemoteUrl | None:
    """A URL with a host and neither a user nor anything that two parsers may read in two ways; else None."""
    if len(url) > MAX_URL or _FORBIDDEN.search(url):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode().lower().removesuffix(".")
        target = quote(parts.path or "/", safe="/%:=&~!$,;'@()*+[]")
        query = quote(parts.query, safe="/%:=&~!$,;'@()*+[]?")
    except ValueError:  # a bad port, address, or name; text that is no Unicode
        return None
    if "@" in parts.netloc or port == 0 or parts.netloc.endswith(":") or not _HOST.fullmatch(host):
        return None
    return RemoteUrl(parts.scheme, host, port or PORTS[parts.scheme], f"{target}?{query}" if query else target)
