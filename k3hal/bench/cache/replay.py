"""Replays a trace through the real scheduler and cache; what the model would do takes simulated time only."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from k3hal.bench.cache.clock import StepClock
from k3hal.bench.cache.flops import k3_cost
from k3hal.bench.cache.outside import SimulatedTier
from k3hal.bench.cache.trace import Trace
from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.keys import NO_CONTEXT, PrefixContext, UnitKeys
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.cache.stats import CacheStats
from k3hal.engine.interface import EngineRequest
from k3hal.engine.request import Request
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.step_plan import StepPlan
from k3hal.errors import CapacityError
from k3hal.sampling_params import SamplingParams

STEP_TOKENS = 16_384
"""Most tokens of a step, as in the runs of the engine we compare with."""

_VOCAB = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """`budget` bytes of one rank for pages and snapshots, those of running requests included; `concurrency` requests
    in flight, 1 being one after the other; `tp` ranks, for the simulated time. With `host` bytes there is an external
    tier of as much host memory for the rank, over `disk` bytes if there are any."""

    geometry: CacheGeometry
    budget: int
    policy: str
    concurrency: int = 1
    tp: int = 8
    match_unit: int = 128
    host: int = 0
    disk: int = 0


@dataclass(slots=True)
class ReplayResult:
    """What a replay counted. Times in seconds, one for each admission and step, `admission_cpu` without the time that
    other processes had the processor; `answer_tokens` are decoded tokens that came back in a prompt, `answer_hits`
    those of them that hit."""

    stats: CacheStats
    page_bytes: int
    tier: SimulatedTier | None = None
    saved_flops: float = 0.0
    prompt_flops: float = 0.0
    answer_tokens: int = 0
    answer_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    simulated: float = 0.0
    admissions: list[float] = field(default_factory=list)
    admission_cpu: list[float] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.stats.cached_tokens / max(self.stats.prompt_tokens, 1)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose prefix some earlier step had computed already, preempted requests' included."""
        again = ("evicted_kv", "no_state", "alignment", "cap")
        resumed = self.stats.resumed_tokens - self.stats.resumed_cached_tokens
        return sum(self.stats.labels[label] for label in again) + resumed


class _TimedCache(PrefixCache):
    """The cache, which notes how long an admission takes: hashing, look-up, memory, eviction."""

    admissions: list[float]
    admission_cpu: list[float]

    def admit(
        self,
        row: int,
        token_ids: np.ndarray,
        reserve_pages: int = 0,
        context: PrefixContext = NO_CONTEXT,
        keys: UnitKeys | None = None,
        *,
        resumed: bool = False,
    ) -> int | None:
        start, worked = time.perf_counter(), time.thread_time()
        cached = super().admit(row, token_ids, reserve_pages, context, keys, resumed=resumed)
        if cached is not None:
            self.admissions.append(time.perf_counter() - start)
            self.admission_cpu.append(time.thread_time() - worked)
        return cached


class Replay:
    """One run; `run` once."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self._requests, self._settings = trace.requests, settings
        self._cost = k3_cost()
        self._clock = StepClock(self._cost, settings.tp)
        longest = max(r.prompt_tokens + max(r.output.size, 1) for r in trace)
        geometry, rows, tier = settings.geometry, settings.concurrency, None
        if settings.host:
            tier = SimulatedTier(geometry, settings.host, settings.disk, settings.match_unit, self._clock)
        self._cache = _TimedCache(
            geometry,
            geometry.runs_in(settings.budget),
            rows,
            longest + 1,
            policy=make_policy(settings.policy),
            match_unit=settings.match_unit,
            seed=b"replay",
            clock=self._clock,
            connector=tier.connector if tier else None,
        )
        self._tier = tier
        self._cache.admissions, self._cache.admission_cpu = [], []
        self._max_len = longest + 1
        self._scheduler = Scheduler(
            self._cache, max_num_seqs=rows, max_num_batched_tokens=max(STEP_TOKENS, rows), max_queue=rows
        )
        self._result = ReplayResult(self._cache.stats, geometry.page_bytes, tier)
        self._waiting = deque(range(len(trace)))
        self._live: dict[str, Request] = {}
        self._done: set[int] = set()
        self._check_room(longest)

    def run(self, tell: Callable[[int, int], None] = lambda done, total: None) -> ReplayResult:
        """Replay everything; `tell` hears now and then how many requests are done."""
        result, scheduler = self._result, self._scheduler
        gc.collect()
        gc.freeze()
        try:
            while self._waiting or self._live:
                self._submit()
                self._step()
                if result.steps % 4096 == 0:
                    tell(len(self._done), len(self._requests))
        finally:
            gc.unfreeze()
        result.admissions, result.admission_cpu = self._cache.admissions, self._cache.admission_cpu
        result.preemptions = scheduler.preemptions
        result.simulated = self._clock.now
        return result

    def _check_room(self, longest: int) -> None:
        room = self._cache.longest_sequence()
        if room < longest:
            raise CapacityError(
                f"a budget of {self._settings.budget / 1e9:.3g} GB holds {room} tokens of one request and the trace's "
                f"longest has {longest}",
                hint="raise --budget-gb",
            )

    def _submit(self) -> None:
        """Send what may be in flight, in order of arrival; who needs an answer that is not there yet waits for it."""
        held: list[int] = []
        while self._waiting and len(self._live) < self._settings.concurrency:
            index = self._waiting.popleft()
            after = self._requests[index].after
            if after is not None and after not in self._done:
                held.append(index)
                continue
            self._send(index)
        self._waiting.extendleft(reversed(held))

    def _send(self, index: int) -> None:
        traced = self._requests[index]
        request = Request.create(
            EngineRequest(
                str(index),
                traced.prompt(),  # pyright: ignore[reportArgumentType]
                SamplingParams(max_tokens=max(traced.output.size, 1), ignore_eos=True),
                arrival_time=self._clock.now,
                context=PrefixContext(boundaries=traced.boundaries),
            ),
            index,
            vocab_size=_VOCAB,
            max_model_len=self._max_len,
            eos_token_ids=(),
            defaults=GenerationDefaults(),
        )
        self._live[request.id] = request
        self._scheduler.add(request)

    def _step(self) -> None:
        scheduler, result = self._scheduler, self._result
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        spent = time.perf_counter() - start
        assert scheduled is not None
        plan, requests = scheduled
        ends = (plan.context_lens + plan.new_lens).tolist()
        spans = zip(plan.context_lens.tolist(), ends, strict=True)
        self._clock.advance(spans, len(plan.copies) * result.page_bytes)
        if self._tier:
            self._move(self._tier, plan)
        start = time.perf_counter()
        ended = [request for request in scheduler.advance(plan, requests) if self._sample(request)]
        if ended:
            scheduler.remove(ended)
        result.step_times.append(spent + time.perf_counter() - start)
        result.steps += 1
        for request in ended:
            self._finish(request)

    def _move(self, tier: SimulatedTier, plan: StepPlan) -> None:
        """What moves to and from the tier; when nothing else is to be done, until something has moved."""
        tier.move(plan.transfers)
        if not plan.num_seqs:
            self._clock.now = max(self._clock.now, tier.next_end)
        self._cache.transferred(tier.ended())

    def _sample(self, request: Request) -> bool:
        """Give a request the token its trace has next; whether it ends with that."""
        output = self._requests[int(request.id)].output
        request.append(output.start + request.num_output)
        return request.finish_reason is not None

    def _finish(self, request: Request) -> None:
        index, cached, result = int(request.id), request.num_cached_tokens, self._result
        del self._live[request.id]
        self._done.add(index)
        result.saved_flops += self._cost.tokens(0, cached)
        result.prompt_flops += self._cost.tokens(0, request.num_prompt)
        begin, end = self._requests[index].answer or (0, 0)
        result.answer_tokens += end - begin
        result.answer_hits += max(min(cached, end) - begin, 0)
