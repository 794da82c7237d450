"""Tokens that may come next: who proposes them, and how many of them a step takes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from k3hal.engine.cache.interface import SequenceCache
from k3hal.engine.request import Request


class Drafter(Protocol):
    """Proposes what may follow. A wrong proposal costs time and changes no output."""

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        """For each request tokens, int64, of which at most as many as its limit are used; none is a proposal too."""
        ...


def pick_drafts(
    drafter: Drafter, decodes: list[Request], cache: SequenceCache, budget: int
) -> list[tuple[Request, np.ndarray]]:
    """The decoding sequences that take drafts along, at most `budget` drafts in all, and room for each.

    Only where every token is known. Drafts preempt nobody, and end where the cache wants a state.
    """
    asked = [request for request in decodes if not request.pending]
    limits = [_limit(request, cache) for request in asked]
    taken: list[tuple[Request, np.ndarray]] = []
    for request, limit, proposed in zip(asked, limits, drafter.propose(asked, limits), strict=True):
        drafts = proposed[: max(min(limit, budget), 0)]
        if request.num_tokens + drafts.size > request.capacity:
            if cache.extend(request.row, request.num_tokens + drafts.size):
                request.set_capacity(cache)
            drafts = drafts[: request.capacity - request.num_tokens]
        if drafts.size:
            taken.append((request, drafts.astype(np.int64)))
            budget -= drafts.size
            request.verifying = True
    return taken


def _limit(request: Request, cache: SequenceCache) -> int:
    """Drafts that could all be of use: after the last a token is sampled."""
    to_end = request.sampling.max_tokens - request.num_output - 1
    to_stop = int(cache.next_stop[request.row]) - request.num_computed - 1
    return max(min(to_end, to_stop), 0)
