"""Drafts that cost no model: what followed when the last tokens came before (prompt lookup)."""

from __future__ import annotations

import numpy as np

from k3hal.engine.request import Request
from k3hal.errors import UsageError

MOST_DRAFTS = 32

_SHORTEST, _LONGEST = 2, 4
"""Tokens at the end of a text that are looked for in it."""

_WINDOW = 16_384
"""Tokens that are looked through, the last ones: it has to be done for every sequence in every step."""


class NgramDrafter:
    """`Drafter` of at most `count` tokens for each request, from its own prompt and answer."""

    def __init__(self, count: int) -> None:
        self.count = count

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        return [
            continuation(request.token_ids[-_WINDOW:], min(limit, self.count))
            for request, limit in zip(requests, limits, strict=True)
        ]


def continuation(tokens: np.ndarray, count: int) -> np.ndarray:
    """What followed in `tokens` int64 [T] when its end came last: `count` tokens, or none where it never did.

    As long an end as possible is looked for. A text that repeats itself goes on repeating itself.
    """
    size, found = tokens.size, np.zeros(0, np.int64)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    for length in range(2, _LONGEST + 1):
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[size - length]] if size > length else ends[:0]
        if not ends.size:
            break
        if length >= _SHORTEST:
            found = ends
    if not found.size or count < 1:
        return np.zeros(0, np.int64)
    start = int(found[-1])
    return tokens[start + np.arange(count) % (size - start)]


def parse_drafter(text: str) -> NgramDrafter:
    """`ngram:N`, N drafts for each sequence in a step. Raises `UsageError`."""
    kind, _, count = text.partition(":")
    if kind != "ngram" or not (count.isascii() and count.isdecimal() and 1 <= int(count[:9]) <= MOST_DRAFTS):
        raise UsageError(f"draft is {text!r:.100}", hint=f"it is ngram:N with N from 1 to {MOST_DRAFTS}, like ngram:4")
    return NgramDrafter(int(count))
