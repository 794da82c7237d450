"""API keys: who may ask, and how much. Only their digests are kept."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3hal.errors import InputError

_LOG = logging.getLogger("k3hal.serve")
_OPTION = re.compile(r"(name|requests_per_minute|max_concurrent)=(\S+)")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
# Seconds between two looks at whether the file has changed.
_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may do; None is no limit. Rates are requests a minute."""

    requests_per_minute: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """`owner` tells keys apart and is no secret; `name` is for logs."""

    digest: bytes
    name: str
    limits: Limits

    @property
    def owner(self) -> str:
        return self.digest.hex()[:32]


class KeyRing:
    """The keys of the command line and those of a file, which is read again when it has changed.

    A line of the file is `KEY` or `sha256:HEX`, then any of `name=…`, `requests_per_minute=N` and `max_concurrent=N`;
    what it leaves out is as in `limits`. A file that cannot be read (any more) changes nothing, and the log says why.
    """

    def __init__(self, keys: Sequence[str], file: Path | None, limits: Limits) -> None:
        """Raises `InputError` for a file that cannot be read or is wrong."""
        self._limits = limits
        self._given = [_key(key, None, limits) for key in keys]
        self._file = file
        self._seen = self._state()
        self._looked = time.monotonic()
        self._keys = [*self._given, *(read_keys(file, limits) if file else ())]

    @property
    def guards(self) -> bool:
        """Whether a key is needed at all. A file that holds none lets nobody in."""
        return bool(self._given) or self._file is not None

    def find(self, token: str) -> Key | None:
        """The key that `token` is, compared with every one in constant time."""
        self._refresh()
        given = hashlib.sha256(token.encode("latin-1", "replace")).digest()  # undoes how ASGI headers are decoded
        found = None
        for key in self._keys:
            if hmac.compare_digest(given, key.digest):
                found = key
        return found

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < _LOOK:
            return
        self._looked = now
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._keys = [*self._given, *read_keys(self._file, self._limits)]
        except InputError as error:
            _LOG.error("the API keys stay as they are: %s", error)
        else:
            _LOG.info("the API keys were read again: %d", len(self._keys))

    def _state(self) -> tuple[int, ...] | None:
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(file: Path, limits: Limits) -> list[Key]:
    """The keys of a file. Raises `InputError` naming the line; no message shows a key."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"cannot read the API keys in {file}: {reason}") from None
    keys: list[Key] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys.append(_read_line(words, f"{file} line {number}", limits))
    return keys


def _read_line(words: Sequence[str], where: str, limits: Limits) -> Key:
    given: dict[str, str] = {}
    for word in words[1:]:
        option = _OPTION.fullmatch(word)
        if option is None:
            raise InputError(f"{where}: after the key come name=…, requests_per_minute=N or max_concurrent=N")
        given[option[1]] = option[2]
    numbers: dict[str, int | None] = {
        "requests_per_minute": limits.requests_per_minute,
        "max_concurrent": limits.max_concurrent,
    }
    for name in numbers:
        if name in given:
            if not (given[name].isascii() and given[name].isdecimal() and int(given[name]) > 0):
                raise InputError(f"{where}: {name} must be a whole number of at least 1, got {given[name]!r:.40}")
            numbers[name] = int(given[name])
    return _key(words[0], given.get("name"), Limits(**numbers))


def _key(secret: str, name: str | None, limits: Limits) -> Key:
    hashed = _HASHED.fullmatch(secret)
    digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(secret.encode()).digest()
    return Key(digest, name or f"key-{digest.hex()[:8]}", limits)
