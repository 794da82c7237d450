"""The input of a batch: JSON lines, each of them a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.errors import InputError, RequestError
from k3hal.offline.settings import CHAT, COMPLETION, Endpoint, GenerateSettings

_ENVELOPE = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line's request, or why it holds none. `custom_id` is the line's own, else `line-N`, counted from 1."""

    custom_id: str
    endpoint: Endpoint = COMPLETION
    body: Mapping[str, Any] | None = None
    error: str = ""

    @property
    def digest(self) -> str:
        """What tells this request from another of the same id."""
        content = json.dumps([self.endpoint, self.body, self.error], sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()[:16]


class BatchInput:
    """A file's requests in order, read anew each time, with the flags' sampling under what a line says."""

    def __init__(self, path: Path, settings: GenerateSettings) -> None:
        """Raises `InputError` for a file that cannot be read and for a `custom_id` that two lines have."""
        self.path = path
        self._settings = settings
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file", hint="a batch reads its input more than once")
        seen: dict[str, int] = {}
        for number, line in self._numbered():
            if line.custom_id in seen:
                raise InputError(
                    f"{path} line {number}: custom_id {line.custom_id!r} is also that of line {seen[line.custom_id]}",
                    hint="answers are told apart by it",
                )
            seen[line.custom_id] = number
        self.ids = frozenset(seen)
        if not seen:
            raise InputError(f"{path} has no lines", hint='a line is {"prompt": "…"} or {"messages": […]}')

    def __iter__(self) -> Iterator[BatchLine]:
        return (line for _, line in self._numbered())

    def _numbered(self) -> Iterator[tuple[int, BatchLine]]:
        """Lines with their numbers; blank ones are skipped."""
        try:
            with self.path.open("rb") as file:
                for number, text in enumerate(file, start=1):
                    if text.strip():
                        yield number, _read_line(text, number, str(self.path), self._settings)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from None


def _read_line(text: bytes, number: int, path: str, settings: GenerateSettings) -> BatchLine:
    """A line's request; one that is malformed carries its error instead."""
    custom_id = f"line-{number}"
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise RequestError("not a JSON object")
        asked = value.get("custom_id", custom_id)
        if not isinstance(asked, str) or not asked:
            raise RequestError(f"custom_id must be a text that is not empty, got {asked!r}")
        if not _is_unicode(asked):
            raise RequestError(f"custom_id {asked!r} is not valid Unicode")
        custom_id = asked
        endpoint, body = _request(value)
    except (ValueError, RecursionError) as error:
        return BatchLine(custom_id, error=f"{path} line {number}: not JSON: {error}")
    except RequestError as error:
        return BatchLine(custom_id, error=f"{path} line {number}: {error}")
    defaults = settings.fields(endpoint)
    if "logprobs" in body:
        defaults.pop("top_logprobs", None)
    return BatchLine(custom_id, endpoint, {**defaults, **body})


def _request(value: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint and body of a line in either form. Raises `RequestError`."""
    if "body" not in value:
        body = {key: item for key, item in value.items() if key != "custom_id"}
        return _endpoint(body, None), body
    unknown = sorted(value.keys() - _ENVELOPE)
    if unknown:
        raise RequestError(f"unknown field {unknown[0]!r} beside body; known are {', '.join(sorted(_ENVELOPE))}")
    if value.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, got {value['method']!r}")
    if not isinstance(value["body"], dict):
        raise RequestError("body must be a JSON object")
    return _endpoint(value["body"], value.get("url")), value["body"]


def _endpoint(body: Mapping[str, Any], url: Any) -> Endpoint:
    """The endpoint that `url` names, else the one whose required field is there."""
    if body.get("stream"):
        raise RequestError("stream is not possible in a batch")
    if url is None:
        if ("messages" in body) == ("prompt" in body):
            raise RequestError('a request has either "messages" or "prompt"')
        return CHAT if "messages" in body else COMPLETION
    if url in (CHAT, COMPLETION):
        return url
    raise RequestError(f"url must be {CHAT} or {COMPLETION}, got {url!r}")


def _is_unicode(text: str) -> bool:
    """Whether a text has a UTF-8 form: JSON's escapes can spell half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
