"""The engine without threads: requests in, one step at a time, increments out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from k3hal.engine.interface import EngineInfo, EngineOutput, EngineRequest, EngineStats, TokenLogprob
from k3hal.engine.request import Request
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

FAILED_STEPS_UNTIL_DEAD = 3
"""Steps that fail in a row before the engine gives up: a lost device fails every step, a bad request does not."""


class Runner(Protocol):
    """What executes plans: a model, or a stand-in that checks the plans themselves."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class _Closed:
    def execute(self, plan: StepPlan) -> StepResult:
        raise RuntimeError("the engine is closed")


class EngineCore:
    """Requests, scheduler and runner, driven by `step`. Not thread-safe."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, info: EngineInfo, defaults: GenerationDefaults | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self.defaults = defaults or GenerationDefaults()
        self.dead: str | None = None
        self._requests: dict[str, Request] = {}
        self._sequence = 0
        self._failed_steps = 0
        self._steps = self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

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
        self.scheduler.running, self.scheduler.waiting = [], []
        for request in requests.values():
            request.finish_reason, request.error = "error", reason
        return [_output(request, -1, None) for request in requests.values()]

    def close(self) -> None:
        """Let go of the runner, and with it of model and arena. Nothing may be called afterwards but `stats`."""
        self.dead = self.dead or "it is closed"
        self.runner = _Closed()

    def step(self) -> list[EngineOutput]:
        """Run one step; what it produced. Nothing to do gives nothing.

        When the runner fails, the requests of the step end with `finish_reason="error"` and the rest go on, unless that
        happens several times in a row: then the engine is dead and every request ends so.
        """
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return []
        plan, requests = scheduled
        try:
            result = self.runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed with %d sequences", plan.epoch, plan.num_seqs)
            return self._fail(plan, requests, f"{type(error).__name__}: {error}")
        if result.epoch != plan.epoch:
            raise RuntimeError(f"the runner answered step {result.epoch}, asked was {plan.epoch}")
        self._failed_steps = 0
        self._steps += 1
        self._generated_tokens += plan.sampled.size
        return self._deliver(self.scheduler.advance(plan, requests), result)

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
        )

    def _refuse_if_dead(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has failed: {self.dead}", hint="restart it; the log has the traceback")

    def _deliver(self, sampled: list[Request], result: StepResult) -> list[EngineOutput]:
        """Append the sampled tokens and report them; requests that ended are forgotten."""
        now = time.monotonic()
        logprobs: Sequence[TokenLogprob | None] = result.logprobs or [None] * len(sampled)
        outputs: list[EngineOutput] = []
        finished: list[Request] = []
        for place, (request, token, logprob) in enumerate(zip(sampled, result.token_ids, logprobs, strict=True)):
            if token < 0:
                request.finish_reason = "error"
                request.error = result.failures.get(place, "the model's logits are not finite")
            else:
                request.append(token)
                request.first_token = request.first_token or now
            if request.finish_reason:
                finished.append(request)
            outputs.append(_output(request, token, logprob))
        if finished:
            self._forget(finished)
        return outputs

    def _fail(self, plan: StepPlan, requests: list[Request], reason: str) -> list[EngineOutput]:
        """End what a failed step touched: its sequences, and when pages were being moved, everything in the cache."""
        self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS_UNTIL_DEAD:
            return self.die(reason)
        lost = list(self.scheduler.running) if len(plan.copies) else requests
        for request in lost:
            request.finish_reason, request.error = "error", reason
        outputs = self._finish(lost)
        if len(plan.copies):
            self.scheduler.cache.forget()
        return outputs

    def _finish(self, requests: list[Request]) -> list[EngineOutput]:
        """Forget requests that end without a token, and tell so."""
        self._forget(requests)
        return [_output(request, -1, None) for request in requests]

    def _forget(self, requests: list[Request]) -> None:
        self.scheduler.remove(requests)
        for request in requests:
            del self._requests[request.id]


def _output(request: Request, token: int, logprob: TokenLogprob | None) -> EngineOutput:
    """One increment: a token (none when negative), and the end when the request has one."""
    ended = request.finish_reason is not None
    return EngineOutput(
        request_id=request.id,
        token_ids=(token,) if token >= 0 else (),
        logprobs=(logprob,) if logprob is not None and token >= 0 else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        timing=request.timing() if ended else None,
        error=request.error,
    )
