"""From the scheduler's choice of sequences to the arrays of a step plan."""

from __future__ import annotations

import numpy as np

from k3hal.engine.cache.interface import SequenceCache
from k3hal.engine.request import Request
from k3hal.engine.step_plan import NOT_YET, RowBinding, StepPlan


def build_plan(
    epoch: int,
    cache: SequenceCache,
    decodes: list[Request],
    verifies: list[tuple[Request, np.ndarray]],
    chunks: list[tuple[Request, int]],
    bindings: tuple[RowBinding, ...],
) -> tuple[StepPlan, list[Request]]:
    """The plan of one step, and its sequences in the plan's order: decodes, those with drafts, chunks of prompts."""
    requests = decodes + [request for request, _ in verifies] + [request for request, _ in chunks]
    first = len(decodes) + len(verifies)
    rows = np.array([r.row for r in requests], np.int32)
    new_lens = np.ones(len(requests), np.int32)
    new_lens[len(decodes) : first] = [1 + drafts.size for _, drafts in verifies]
    new_lens[first:] = [chunk for _, chunk in chunks]
    sampled = [i for i in range(first) if requests[i].remaining == 1]
    sampled += [first + i for i, (request, chunk) in enumerate(chunks) if chunk == request.remaining]
    width = max(int(cache.num_pages[rows].max(initial=1)), 1)
    plan = StepPlan(
        epoch=epoch,
        num_decodes=len(decodes),
        rows=rows,
        slots=cache.slots[rows],
        context_lens=np.array([r.num_computed for r in requests], np.int32),
        new_lens=new_lens,
        page_table=cache.page_table[rows, :width],
        token_ids=_gather_tokens(decodes, verifies, chunks),
        sampled=np.array(sampled, np.int64),
        positions=np.array([requests[i].num_output + requests[i].pending for i in sampled], np.int64),
        num_verifies=len(verifies),
        bindings=bindings,
        copies=cache.take_copies(),
        transfers=cache.take_transfers(),
    )
    return plan, requests


def _gather_tokens(
    decodes: list[Request], verifies: list[tuple[Request, np.ndarray]], chunks: list[tuple[Request, int]]
) -> np.ndarray:
    """The step's token ids: one for each decode, then tokens with their drafts, then the chunks."""
    first = [r.buffer[r.num_computed] if r.num_computed < r.num_tokens else NOT_YET for r in decodes]
    parts = [np.array(first, np.int64)]
    for request, drafts in verifies:
        parts += [request.buffer[request.num_computed : request.num_computed + 1], drafts]
    parts += [r.buffer[r.num_computed : r.num_computed + new] for r, new in chunks]
    return np.concatenate(parts)
