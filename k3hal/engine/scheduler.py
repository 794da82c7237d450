"""Continuous batching: which sequences compute which tokens in the next step."""

from __future__ import annotations

import time
from bisect import insort
from operator import attrgetter

import numpy as np

from k3hal.engine.cache.interface import SequenceCache
from k3hal.engine.cache.keys import UnitKeys
from k3hal.engine.drafts import Drafter, pick_drafts
from k3hal.engine.plan_builder import build_plan
from k3hal.engine.request import NO_ROW, Request
from k3hal.engine.step_plan import RowBinding, StepPlan
from k3hal.errors import QueueFullError, RequestError

_rank = attrgetter("rank")

_MOST_DEFERRED = 32
"""Requests that may be passed over in a step: each costs a look."""

_FIRST_SHARE = 0.75
"""Of what a step has left for prompts, the most that the first one takes while others wait; they share the rest."""

_LOOK_AHEAD = 8
"""Waiting requests for which a prompt that starts is asked to stop where they part from it."""


class Scheduler:
    """Plans steps. Decodes go first, then prefills under way, then admissions, all in rank order.

    A sequence is admitted when the pages of all its known tokens fit, so only growth can run out of memory; then the
    lowest-ranked sequence is preempted: it gives everything back and later starts again from its prompt and what it
    generated. The highest-ranked one is never preempted and always fits alone, hence somebody always advances.

    A step may be planned while earlier ones are under way; the steps run one after the other, as planned. A token that
    such a step samples is planned for unseen. Then three things wait for what is under way: a sequence that verifies
    drafts, or stops at a place whose name needs the token; a preemption, until nothing is; and the memory of a request
    that has ended, until the last step that was planned with it has run.
    """

    def __init__(
        self,
        cache: SequenceCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_queue: int,
        drafter: Drafter | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("a step must have room for one token of every running sequence")
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue = max_queue
        self.drafter = drafter
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        self.preemptions = self.prompt_tokens = self.cached_tokens = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._epoch = 0
        self._ran = -1
        self._bindings: list[RowBinding] = []
        self._stopped: list[Request] = []

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.leaving)

    @property
    def under_way(self) -> int:
        """Steps that are planned and have not run."""
        return self._epoch - 1 - self._ran

    def check_room(self, submitted: int = 0) -> None:
        """Raise `QueueFullError` when no further request may come, `submitted` ones being on their way.

        At most `max_queue` wait, beside those for which a row is free.
        """
        queued = len(self.waiting) + submitted
        if queued < self.max_queue + len(self._free_rows):
            return
        if self.max_queue:
            raise QueueFullError(f"the queue is full: {queued} requests are waiting", hint="try again later")
        raise QueueFullError(
            f"max_num_seqs {self.max_num_seqs} requests are under way, and max_queue 0 lets no other wait",
            hint="try again later",
        )

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
        """Forget requests, wherever they are, and free what they hold: now, or when the steps they are in have run.

        What they computed may serve others, unless they ended in an error.
        """
        gone = {request.id for request in requests}
        for request in requests:
            if request.row != NO_ROW and request.last_epoch > self._ran:
                self.leaving.append(request)
            elif request.row != NO_ROW:
                self._release(request)
            elif request.keys is not None:
                self.cache.leave(request.keys)
        self.running = [r for r in self.running if r.id not in gone]
        self.waiting = [r for r in self.waiting if r.id not in gone]

    def free_left(self) -> None:
        """Free what ended requests hold whose last step has run. After what it sampled is appended to them."""
        if not self.leaving:
            return
        for request in self.leaving:
            if request.last_epoch <= self._ran:
                self._release(request)
        self.leaving = [request for request in self.leaving if request.row != NO_ROW]

    def schedule(self) -> tuple[StepPlan, list[Request]] | None:
        """The next step and its sequences in the plan's order, or None when there is nothing to do.

        None also while all there is to do must wait for steps under way. A step has no sequences when all wait for the
        external tier, or only that has something to do.
        """
        self._reach()
        if not (self.running or self.waiting or self.cache.transferring):
            return None
        preempted_before = self.preemptions
        grown = self._grow_decodes()
        if grown is None:
            return None
        decodes, prefills = grown
        budget = self.max_num_batched_tokens - len(decodes)
        verifies: list[tuple[Request, np.ndarray]] = []
        if self.drafter is not None:
            verifies = pick_drafts(self.drafter, decodes, self.cache, budget // 2)
            drafted = {request.id for request, _ in verifies}
            decodes = [request for request in decodes if request.id not in drafted]
            budget -= sum(drafts.size for _, drafts in verifies)
        chunks: list[tuple[Request, int]] = []
        for i, request in enumerate(prefills):
            if budget and request.row != NO_ROW:
                others = len(prefills) - i - 1 + bool(self.waiting and self._free_rows)
                budget -= self._add_chunk(request, budget, chunks, others)
        if self.preemptions == preempted_before:
            self._admit(budget, chunks)
        if decodes or verifies or chunks:
            return self._plan(decodes, verifies, chunks)
        if self.under_way:
            return None
        if not self.cache.transferring:
            raise RuntimeError("requests are left and none can run; admission promised that one always can")
        return self._plan([], [], [])

    def advance(self, plan: StepPlan, requests: list[Request], accepted: list[int] | None = None) -> list[Request]:
        """A step has run, `accepted` drafts of each sequence that verified; the requests sampled, in the plan's order.

        To be called for every plan, in order. What was sampled is then to be appended to the requests.
        """
        self._ran = plan.epoch
        for i, drafts in zip(range(plan.verifies.start, plan.verifies.stop), accepted or (), strict=True):
            request = requests[i]
            request.num_computed += 1 + drafts
            if request.row != NO_ROW and request.num_computed >= self.cache.next_stop[request.row]:
                self._stopped.append(request)
        sampled = [requests[i] for i in plan.sampled.tolist()]
        for request in sampled:
            request.pending -= 1
            request.verifying = False
        self._reach()
        return sampled

    def give_up(self) -> None:
        """The steps under way have failed or will not run. The requests in them are to be removed with an error."""
        self._ran = self._epoch - 1
        self._stopped = []

    def _reach(self) -> None:
        """Tell the cache of the sequences that have come to a stop, or will have when the next step begins."""
        late: list[Request] = []
        for request in self._stopped:
            if request.row != NO_ROW and request.known:
                self.cache.reach(request.row, request.computed)
            elif request.row != NO_ROW:
                late.append(request)
        self._stopped = late

    def _grow_decodes(self) -> tuple[list[Request], list[Request]] | None:
        """The sequences that decode, each with room for its token, and those whose prompts are under way.

        Sequences from the end of the ranking pay for the room; they may be among the second. None when one would have
        to and steps are under way.
        """
        decodes: list[Request] = []
        prefills: list[Request] = []
        stopped = {request.id for request in self._stopped}
        for request in tuple(self.running):
            computed, tokens = request.num_computed, request.num_tokens + request.pending
            if request.pending and (request.full or request.verifying or request.id in stopped):
                continue
            if tokens - computed != 1 or not computed:
                prefills.append(request)
            elif tokens <= request.capacity:
                decodes.append(request)
            elif request.row != NO_ROW:
                while not self.cache.extend(request.row, tokens):
                    if self.under_way:
                        return None
                    self._preempt(self.running[-1])
                    if request.row == NO_ROW:
                        break
                else:
                    request.set_capacity(self.cache)
                    decodes.append(request)
        return decodes, prefills

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
            others = min(len(self.waiting) - index, len(self._free_rows))
            budget -= self._add_chunk(request, budget, chunks, others)

    def _add_chunk(self, request: Request, budget: int, chunks: list[tuple[Request, int]], others: int) -> int:
        """Plan the request's next chunk, of at most `budget` tokens and no farther than the cache wants; its length.

        One that needs more leaves some to `others` behind it: a long prompt takes longer then, and holds up nobody.
        """
        start = request.num_computed
        if others and request.remaining > budget:
            budget = max(budget // (others + 1) if chunks else int(budget * _FIRST_SHARE), 1)
        chunk = self.cache.chunk_end(request.row, start, start + min(request.remaining, budget)) - start
        chunks.append((request, chunk))
        return chunk

    def _start(self, request: Request, row: int, cached: int) -> None:
        request.row, request.num_computed = row, cached
        request.set_capacity(self.cache)
        if not request.scheduled:
            request.scheduled = time.monotonic()
            request.num_cached_tokens = cached
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += cached
        insort(self.running, request, key=_rank)
        tokens = request.token_ids.copy()
        self._bindings.append(RowBinding(row, request.sampling, tokens, request.num_prompt, request.constraint))

    def _release(self, request: Request, *, preempted: bool = False) -> None:
        trusted = request.finish_reason != "error" and not request.spoilt
        self.cache.release(request.row, request.computed if trusted else None, preempted=preempted)
        self._free_rows.append(request.row)
        request.row, request.num_computed, request.capacity = NO_ROW, 0, 0

    def _plan(
        self, decodes: list[Request], verifies: list[tuple[Request, np.ndarray]], chunks: list[tuple[Request, int]]
    ) -> tuple[StepPlan, list[Request]]:
        """Gather the step and count it as planned. A prefill chunk of one token over a valid state is a decode."""
        decodes = decodes + [request for request, chunk in chunks if chunk == 1 and request.num_computed]
        chunks = [(request, chunk) for request, chunk in chunks if chunk > 1 or not request.num_computed]
        plan, requests = build_plan(self._epoch, self.cache, decodes, verifies, chunks, tuple(self._bindings))
        self._bindings.clear()
        self._epoch += 1
        stops = self.cache.next_stop[plan.rows]
        for request in requests:
            request.last_epoch = plan.epoch
        for i in plan.sampled.tolist():
            requests[i].pending += 1
        # How far a sequence comes that verifies drafts is known when the step has run.
        planned = plan.context_lens + plan.new_lens
        planned[plan.verifies] = plan.context_lens[plan.verifies]
        for request, computed in zip(requests, planned.tolist(), strict=True):
            request.num_computed = computed
        self._stopped += [requests[i] for i in np.flatnonzero(planned >= stops).tolist()]
        return plan, requests
