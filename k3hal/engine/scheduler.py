"""Continuous batching: which sequences compute which tokens in the next step."""

from __future__ import annotations

import time
from bisect import insort
from operator import attrgetter

import numpy as np

from k3hal.engine.cache.interface import SequenceCache
from k3hal.engine.cache.keys import UnitKeys
from k3hal.engine.request import NO_ROW, Request
from k3hal.engine.step_plan import RowBinding, StepPlan
from k3hal.errors import QueueFullError, RequestError

_rank = attrgetter("rank")

_MOST_DEFERRED = 32
"""Requests that may be passed over in a step: each costs a look."""

_LOOK_AHEAD = 8
"""Waiting requests for which a prompt that starts is asked to stop where they part from it."""


class Scheduler:
    """Plans steps. Decodes go first, then prefills under way, then admissions, all in rank order.

    A sequence is admitted when the pages of all its known tokens fit, so only growth can run out of memory; then the
    lowest-ranked sequence is preempted: it gives everything back and later starts again from its prompt and what it
    generated. The highest-ranked one is never preempted and always fits alone, hence somebody always advances.
    """

    def __init__(self, cache: SequenceCache, *, max_num_seqs: int, max_num_batched_tokens: int, max_queue: int) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("a step must have room for one token of every running sequence")
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue = max_queue
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = self.prompt_tokens = self.cached_tokens = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._epoch = 0
        self._bindings: list[RowBinding] = []

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    def check_room(self, submitted: int = 0) -> None:
        """Raise `QueueFullError` when no further request may come, `submitted` ones being on their way.

        At most `max_queue` wait, beside those for which a row is free.
        """
        queued = len(self.waiting) + submitted
        if queued >= self.max_queue + len(self._free_rows):
            raise QueueFullError(f"the queue is full: {queued} requests are waiting", hint="try again later")

    def check_fits(self, request: Request) -> None:
        """Raise `RequestError` when a request could not run even alone."""
        longest = self.cache.longest_sequence()
        if request.num_prompt + request.sampling.max_tokens - 1 > longest:
            raise RequestError(
                f"the prompt's {request.num_prompt} tokens and max_tokens {request.sampling.max_tokens} exceed "
                f"the {longest} tokens that the cache holds",
                hint="lower max_tokens or raise --memory-budget",
                param="max_tokens",
            )

    def name(self, request: Request) -> UnitKeys:
        """The names of a request's prefixes, computed now if they are not yet. Before `add`, from any thread."""
        if request.keys is None:
            request.keys = self.cache.keys(request.context)
            request.keys.chain(request.token_ids)
        return request.keys

    def add(self, request: Request) -> None:
        """Queue a request that fits, after those of its rank."""
        insort(self.waiting, request, key=_rank)

    def remove(self, requests: list[Request]) -> None:
        """Forget requests, wherever they are, and free what they hold. Not while their step is under way.

        What they computed may serve others, unless they ended in an error.
        """
        gone = {request.id for request in requests}
        for request in requests:
            if request.row != NO_ROW:
                self._release(request, trusted=request.finish_reason != "error")
        self.running = [r for r in self.running if r.id not in gone]
        self.waiting = [r for r in self.waiting if r.id not in gone]

    def schedule(self) -> tuple[StepPlan, list[Request]] | None:
        """The next step and its sequences in the plan's order, or None when there is nothing to do."""
        if self.idle:
            return None
        preempted_before = self.preemptions
        decodes, prefills = self._grow_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        chunks: list[tuple[Request, int]] = []
        for request in prefills:
            if budget and request.row != NO_ROW:
                budget -= self._add_chunk(request, budget, chunks)
        if self.preemptions == preempted_before:
            self._admit(budget, chunks)
        if not decodes and not chunks:
            raise RuntimeError("requests are left and none can run; admission promised that one always can")
        return self._plan(decodes, chunks)

    def advance(self, plan: StepPlan, requests: list[Request]) -> list[Request]:
        """Count a step's tokens as computed; the requests whose next token was sampled, in the plan's order."""
        for request, new in zip(requests, plan.new_lens.tolist(), strict=True):
            request.num_computed += new
        reached = np.flatnonzero(plan.context_lens + plan.new_lens >= self.cache.next_stop[plan.rows])
        for i in reached.tolist():
            self.cache.reach(requests[i].row, requests[i].computed)
        return [requests[i] for i in plan.sampled.tolist()]

    def _grow_decodes(self) -> tuple[list[Request], list[Request]]:
        """The sequences that decode, each with room for its token, and those whose prompts are under way.

        Sequences from the end of the ranking pay for the room; they may be among the second.
        """
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in tuple(self.running):
            computed, tokens = request.num_computed, request.num_tokens
            if tokens - computed != 1 or not computed:
                prefills.append(request)
            elif tokens <= request.capacity or (request.row != NO_ROW and self._extend(request)):
                decodes.append(request)
        return decodes, prefills

    def _extend(self, request: Request) -> bool:
        """Make room for one more token, preempting from the end; False when `request` itself had to go."""
        while not self.cache.extend(request.row, request.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self._set_capacity(request)
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request, preempted=True)
        self.running.remove(request)
        insort(self.waiting, request, key=_rank)
        self.preemptions += 1

    def _admit(self, budget: int, chunks: list[tuple[Request, int]]) -> None:
        """Admit from the queue while budget, rows and memory last. The first that does not fit holds up the rest.

        One whose prefix a running prompt is about to leave waits for it and holds up nobody, unless very many do. One
        page per running sequence stays free, so that an admission does not preempt somebody at once.
        """
        index = 0
        while index < min(len(self.waiting), _MOST_DEFERRED) and budget and self._free_rows:
            request = self.waiting[index]
            row = self._free_rows[-1]
            keys = self.name(request)
            if self.cache.defer(request.token_ids, keys):
                index += 1
                continue
            reserve = len(self.running)
            resumed = request.scheduled > 0
            cached = self.cache.admit(row, request.token_ids, reserve, keys=keys, resumed=resumed)
            if cached is None:
                return
            self.waiting.pop(index)
            self._free_rows.pop()
            self._start(request, row, cached)
            for other in self.waiting[index : index + _LOOK_AHEAD]:
                self.cache.expect(row, other.token_ids, self.name(other))
            budget -= self._add_chunk(request, budget, chunks)

    def _add_chunk(self, request: Request, budget: int, chunks: list[tuple[Request, int]]) -> int:
        """Plan the request's next chunk, of at most `budget` tokens and no farther than the cache wants; its length."""
        start = request.num_computed
        chunk = self.cache.chunk_end(request.row, start, start + min(request.remaining, budget)) - start
        chunks.append((request, chunk))
        return chunk

    def _start(self, request: Request, row: int, cached: int) -> None:
        request.row, request.num_computed = row, cached
        self._set_capacity(request)
        if not request.scheduled:
            request.scheduled = time.monotonic()
            request.num_cached_tokens = cached
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += cached
        insort(self.running, request, key=_rank)
        tokens = request.token_ids.copy()
        self._bindings.append(RowBinding(row, request.sampling, tokens, request.num_prompt, request.constraint))

    def _set_capacity(self, request: Request) -> None:
        """Remember the tokens a row has pages for; without pages only the table's width limits it."""
        pages = int(self.cache.num_pages[request.row])
        request.capacity = pages * self.cache.page_tokens if pages else self.cache.longest_sequence()

    def _release(self, request: Request, *, trusted: bool = True, preempted: bool = False) -> None:
        self.cache.release(request.row, request.computed if trusted else None, preempted=preempted)
        self._free_rows.append(request.row)
        request.row, request.num_computed, request.capacity = NO_ROW, 0, 0

    def _plan(self, decodes: list[Request], chunks: list[tuple[Request, int]]) -> tuple[StepPlan, list[Request]]:
        """Gather the step. A prefill chunk of one token over a valid state is a decode."""
        single = [request for request, chunk in chunks if chunk == 1 and request.num_computed]
        chunks = [(request, chunk) for request, chunk in chunks if chunk > 1 or not request.num_computed]
        requests = decodes + single + [request for request, _ in chunks]
        num_decodes = len(decodes) + len(single)
        rows = np.array([r.row for r in requests], np.int32)
        context_lens = np.array([r.num_computed for r in requests], np.int32)
        new_lens = np.ones(len(requests), np.int32)
        new_lens[num_decodes:] = [chunk for _, chunk in chunks]
        sampled = [i for i in range(num_decodes) if requests[i].decoding]
        sampled += [num_decodes + i for i, (request, chunk) in enumerate(chunks) if chunk == request.remaining]
        width = max(int(self.cache.num_pages[rows].max(initial=1)), 1)
        plan = StepPlan(
            epoch=self._epoch,
            num_decodes=num_decodes,
            rows=rows,
            slots=self.cache.slots[rows],
            context_lens=context_lens,
            new_lens=new_lens,
            page_table=self.cache.page_table[rows, :width],
            token_ids=_gather_tokens(requests, num_decodes, new_lens),
            sampled=np.array(sampled, np.int64),
            positions=np.array([requests[i].num_output for i in sampled], np.int64),
            bindings=tuple(self._bindings),
            copies=self.cache.take_copies(),
        )
        self._bindings.clear()
        self._epoch += 1
        return plan, requests


def _gather_tokens(requests: list[Request], num_decodes: int, new_lens: np.ndarray) -> np.ndarray:
    """The step's token ids: one for each decode, then the chunks."""
    first = np.array([r.buffer[r.num_computed] for r in requests[:num_decodes]], np.int64)
    parts = [first]
    for request, new in zip(requests[num_decodes:], new_lens[num_decodes:].tolist(), strict=True):
        parts.append(request.buffer[request.num_computed : request.num_computed + new])
    return np.concatenate(parts)
