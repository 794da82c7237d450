"""The responses a server remembers, so that `previous_response_id` can continue one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from k3hal.serve.http_errors import HttpError

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A finished response, and the whole conversation up to its end."""

    owner: str
    response: dict[str, Any]
    items: tuple[Item, ...]
    size: int


class ResponseStore:
    """In memory; the least recently used go first, beyond `max_responses` or `max_bytes` of JSON.

    Whoever bears another key than the one a response was made with does not find it.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._room = self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, owner: str, response: dict[str, Any], items: tuple[Item, ...]) -> None:
        """Remember a response, unless it alone is more than fits."""
        size = len(orjson.dumps(response)) + sum(len(orjson.dumps(item)) for item in items)
        if self._max_responses == 0 or size > self._max_bytes:
            return
        self._stored[response["id"]] = Stored(owner, response, items, size)
        self._room -= size
        while self._room < 0 or len(self._stored) > self._max_responses:
            _, oldest = self._stored.popitem(last=False)
            self._room += oldest.size

    def get(self, owner: str, name: str, param: str | None = None) -> Stored:
        """The response `name` of `owner`; 404 if there is none (any more)."""
        stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise HttpError(
                404,
                f"there is no response {name!r:.100} (any more): {self._max_responses} are kept at most",
                kind="invalid_request_error",
                code="response_not_found",
                param=param,
            )
        self._stored.move_to_end(name)
        return stored

    def item(self, owner: str, name: object) -> Item | None:
        """The item called `name` in one of `owner`'s conversations."""
        for stored in reversed(self._stored.values()):
            if stored.owner == owner:
                for item in stored.items:
                    if item.get("id") == name:
                        return item
        return None

    def delete(self, owner: str, name: str) -> None:
        self._room += self.get(owner, name).size
        del self._stored[name]
