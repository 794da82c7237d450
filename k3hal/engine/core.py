"""The engine without threads: requests in, one step at a time, increments out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from k3hal.engine.flights import Flight, Flights, Runner
from k3hal.engine.interface import (
    ConstraintError,
    DeadEndError,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    TokenLogprob,
)
from k3hal.engine.request import NO_ROW, Request
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.engine.step_times import StepTimes
from k3hal.engine.tier.interface import TransferDone
from k3hal.errors import DeviceLostError, EngineDeadError, RequestError

logger = logging.getLogger(__name__)

FAILED_STEPS_UNTIL_DEAD = 3
"""Steps that fail in a row before the engine gives up: a lost device fails every step, a bad request does not."""


_PAUSE_SECONDS = 0.001
"""Wait for the external tier before it is asked again, when there is nothing else to do."""

_SETTLE_SECONDS = 5.0
"""Most time for movements to end when the engine is closed."""


class _Closed:
    def execute(self, plan: StepPlan) -> StepResult:
        raise RuntimeError("the engine is closed")


class EngineCore:
    """Requests, scheduler and runner, driven by `step`. Not thread-safe.

    Up to `async_depth` steps are planned before the first of them has been answered.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        defaults: GenerationDefaults | None = None,
        async_depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.flights = Flights(async_depth)
        self.runner = runner
        self.info = info
        self.defaults = defaults or GenerationDefaults()
        self.dead: str | None = None
        self.timings: StepTimes | None = None
        self._requests: dict[str, Request] = {}
        self._sequence = 0
        self._failed_steps = 0
        self._steps = self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do. When no request is left that takes a few steps at most."""
        busy = self.dead is None and self.scheduler.cache.transferring
        return bool(self._requests or self.flights) or busy

    def check(self, request: EngineRequest) -> Request:
        """A request ready to be added. Raises `RequestError`, or `EngineDeadError` when nothing will ever run again."""
        self._refuse_if_dead()
        created = Request.create(
            request,
            self._sequence,
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
            eos_token_ids=self.info.eos_token_ids,
            defaults=self.defaults,
        )
        self.scheduler.check_fits(created)
        self.scheduler.name(created)
        return created

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError`, `QueueFullError` or `EngineDeadError`."""
        self.scheduler.check_room()
        self.enqueue(self.check(request))

    def enqueue(self, request: Request) -> None:
        """Queue a checked request behind those of its priority.

        Raises `RequestError` when its id is taken, `EngineDeadError` when the engine died since the check.
        """
        self._refuse_if_dead()
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is already in use", param="request_id")
        request.rank = (request.rank[0], self._sequence)
        self._sequence += 1
        self._requests[request.id] = request
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Stop requests now; the last output of each that existed."""
        found = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in found:
            request.finish_reason = "abort"
        return self._finish(found)

    def abort_all(self) -> list[EngineOutput]:
        return self.abort(list(self._requests))

    def die(self, reason: str, others: Iterable[Request] = ()) -> list[EngineOutput]:
        """Give up for good: every request (and `others`, not queued yet) ends with `finish_reason="error"`.

        No other is accepted afterwards. The cache is left as it is: what went wrong may have left it inconsistent.
        """
        self.dead = reason
        requests = {request.id: request for request in others} | self._requests
        self._requests = {}
        self.scheduler.running, self.scheduler.waiting, self.scheduler.leaving = [], [], []
        self.flights.drop()
        self.scheduler.give_up()
        for request in requests.values():
            request.finish_reason, request.error = "error", reason
        return [_output(request) for request in requests.values()]

    def close(self) -> None:
        """Let go of the runner, and with it of model and arena. Nothing may be called afterwards but `stats`.

        What ended requests left for the external tier still goes there.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not self._requests and self.has_work and time.monotonic() < deadline:
            self.step()
        self.dead = self.dead or "it is closed"
        self.runner = _Closed()
        self.flights.close()
        self.scheduler.cache.close()

    def step(self) -> list[EngineOutput]:
        """Plan as far ahead as may be, and wait for one step; what it produced. Nothing to do gives nothing.

        When the runner fails, the requests of the step end with `finish_reason="error"` and the rest go on, unless that
        happens several times in a row: then the engine is dead and every request ends so. An interrupt (Ctrl-C) passes
        through, and the requests whose steps were under way have ended.
        """
        while len(self.flights) < self.flights.depth and (scheduled := self._schedule()) is not None:
            self.flights.start(self.runner, *scheduled)
        if not self.flights:
            return []
        flight = self.flights.land()
        plan = flight.plan
        try:
            result = flight.answer.result()
        except Exception as error:
            logger.exception("step %d failed with %d sequences", plan.epoch, plan.num_seqs)
            reason = f"{type(error).__name__}: {error}"
            self._failed_steps += 1
            lost = isinstance(error, DeviceLostError) or self._failed_steps == FAILED_STEPS_UNTIL_DEAD
            return self.die(reason) if lost else self._fail(flight, reason)
        except BaseException:
            self._fail(flight, "the step was interrupted")
            raise
        if result.epoch != plan.epoch:
            raise RuntimeError(f"the runner answered step {result.epoch}, asked was {plan.epoch}")
        self._failed_steps = 0
        with self.timings.part("deliver") if self.timings else nullcontext():
            return self._advance(flight, result)

    def _schedule(self) -> tuple[StepPlan, list[Request]] | None:
        with self.timings.part("schedule") if self.timings else nullcontext():
            return self.scheduler.schedule()

    def _advance(self, flight: Flight, result: StepResult) -> list[EngineOutput]:
        """A step has run: tell the scheduler, and hand out what was sampled."""
        plan = flight.plan
        self.scheduler.cache.transferred(result.transferred)
        self._steps += plan.num_seqs > 0
        sampled = self.scheduler.advance(plan, flight.requests, result.accepted)
        outputs = self._deliver(sampled, flight, result)
        self.scheduler.free_left()
        if not plan.num_seqs:
            self.scheduler.cache.pause(_PAUSE_SECONDS)
        return outputs

    def stats(self, submitted: int = 0) -> EngineStats:
        """Present figures; `submitted` requests more are on their way to the queue. May be called from any thread."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + submitted,
            kv_usage=self.scheduler.cache.usage,
            steps=self._steps,
            prompt_tokens=self.scheduler.prompt_tokens,
            cached_prompt_tokens=self.scheduler.cached_tokens,
            generation_tokens=self._generated_tokens,
            preemptions=self.scheduler.preemptions,
            prefix=self.scheduler.cache.stats,
            cached_usage=self.scheduler.cache.cached_usage,
            tier=self.scheduler.cache.tier_stats,
            dead=self.dead,
        )

    def _refuse_if_dead(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has failed: {self.dead}", hint="restart it; the log has the traceback")

    def _deliver(self, sampled: list[Request], flight: Flight, result: StepResult) -> list[EngineOutput]:
        """Append the sampled tokens and report them; requests that ended are forgotten."""
        now = time.monotonic()
        outputs: list[EngineOutput] = []
        finished: list[Request] = []
        counts = _tokens_each(flight.plan, result)
        tokens, logprobs = iter(result.token_ids), iter(result.logprobs or [])
        rows = flight.plan.rows[flight.plan.sampled].tolist()
        for request, count, row in zip(sampled, counts, rows, strict=True):
            group = [next(tokens) for _ in range(count)]
            asked = [next(logprobs) for _ in range(count)] if result.logprobs else [None] * count
            ended = request.finish_reason is not None
            taken = _append(request, group, result.failures.get(row))
            if ended:
                continue
            self._generated_tokens += taken
            if taken:
                request.first_token = request.first_token or now
            if request.finish_reason:
                finished.append(request)
            outputs.append(_output(request, group[:taken], asked[:taken]))
        if finished:
            self._forget(finished)
        return outputs

    def _fail(self, flight: Flight, reason: str) -> list[EngineOutput]:
        """End what failed steps touched: their sequences, and when pages were being moved, everything in the cache.

        The steps that were planned on the success of the one that failed have failed too.
        """
        lost = self.flights.drop(flight)
        copied = any(len(one.plan.copies) for one in lost)
        ended = [epoch for one in lost for epoch in one.plan.transfers.epochs]
        for request in [request for one in lost for request in one.requests]:
            request.spoilt = True
        self.scheduler.cache.transferred(TransferDone(epoch, ok=False) for epoch in ended)
        self.scheduler.give_up()
        self.scheduler.free_left()
        gone = [request for request in self._requests.values() if request.spoilt or (copied and request.row != NO_ROW)]
        for request in gone:
            request.finish_reason, request.error = "error", reason
        outputs = self._finish(gone)
        if copied:
            self.scheduler.cache.forget()
        return outputs

    def _finish(self, requests: list[Request]) -> list[EngineOutput]:
        """Forget requests that end without a token, and tell so."""
        self._forget(requests)
        return [_output(request) for request in requests]

    def _forget(self, requests: list[Request]) -> None:
        self.scheduler.remove(requests)
        for request in requests:
            del self._requests[request.id]


def _append(request: Request, tokens: list[int], failure: ConstraintError | None) -> int:
    """Give a request what a step sampled for it; how many of the tokens it takes before it ends.

    `failure` says why where a token could not be sampled, None that the logits were no numbers.
    """
    taken = 0
    for token in tokens:
        if request.finish_reason is not None:
            request.append_surplus(token)
        elif token < 0:
            why = f"the constraint on the output failed: {failure}" if failure else "the model's logits are not finite"
            request.finish_reason, request.error = "error", why
            request.dead_end = isinstance(failure, DeadEndError)
        else:
            request.append(token)
            taken += 1
    return taken


def _tokens_each(plan: StepPlan, result: StepResult) -> list[int]:
    """How many tokens a step gives each of `plan.sampled`."""
    if not plan.num_verifies:
        return [1] * plan.sampled.size
    first = plan.verifies.start
    return [1 + (result.accepted[i - first] if first <= i < plan.verifies.stop else 0) for i in plan.sampled.tolist()]


def _output(request: Request, tokens: Sequence[int] = (), logprobs: Sequence[TokenLogprob | None] = ()) -> EngineOutput:
    """One increment: tokens, and the end when the request has one."""
    ended = request.finish_reason is not None
    known = tuple(one for one in logprobs if one is not None)
    return EngineOutput(
        request_id=request.id,
        token_ids=tuple(tokens),
        logprobs=known or None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        timing=request.timing() if ended else None,
        error=request.error,
        dead_end=request.dead_end,
    )
