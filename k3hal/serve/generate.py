"""Running the choices of a request, whatever kind they are: streams, whole answers, usage and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from k3hal.engine.interface import EngineOutput, RequestTiming
from k3hal.sampling_params import SamplingParams
from k3hal.serve.metrics import Metrics
from k3hal.serve.request_info import RequestInfo
from k3hal.serve.router import Generation

D_co = TypeVar("D_co", covariant=True)
D = TypeVar("D")


class Choice(Protocol[D_co]):
    """One sequence being turned into an answer."""

    cached_tokens: int
    token_ids: list[int]
    finish_reason: str | None
    stopped_early: bool
    reasoning_tokens: int

    @property
    def recoveries(self) -> Mapping[str, int]:
        """How often each kind of malformed output was understood anyway."""
        ...

    def feed(self, output: EngineOutput) -> D_co: ...


class Step(NamedTuple, Generic[D]):
    """What one engine output did to choice number `choice`; `new_ids` are the tokens it added."""

    choice: int
    delta: D
    new_ids: list[int]


class Run(Generic[D]):
    """The choices of one request, fed from a generation. Close it whatever happens."""

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice[D]],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        metrics: Metrics,
        info: RequestInfo,
        timeout: float | None = None,
    ) -> None:
        """After `timeout` seconds the engine is told to stop, and `steps` raises a 504."""
        self.choices = choices
        self.prompt_tokens = sum(map(len, prompts))
        self._n = params.n
        self._generation = generation
        self._metrics = metrics
        self._info = info
        self._deadline = generation.expire_after(timeout) if timeout else None
        self._clocks = [metrics.follow() for _ in choices]
        for prompt in prompts:
            metrics.accepted(len(prompt), params.n, params.max_tokens)

    async def steps(self) -> AsyncIterator[Step[D]]:
        """Each output as it arrives, until every choice is complete. Raises `HttpError` when the engine gives up."""
        while self._generation.unfinished:
            for index, output in await self._generation.next():
                step = self._feed(index, output)
                if step is not None:
                    yield step

    @property
    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def disconnect(self) -> None:
        """The client is gone: abort at once."""
        self._metrics.disconnected()
        self._info.status = 499
        self._generation.disconnect()

    def close(self) -> None:
        """Abort what still runs, if anything does, and leave the figures for the log."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._generation.close()
        usage = self.usage()
        self._info.facts |= {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "finish_reasons": [choice.finish_reason for choice in self.choices],
        }

    def usage(self) -> dict[str, Any]:
        """Tokens so far: every prompt once, all choices together."""
        completion = sum(len(choice.token_ids) for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._n])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(c.reasoning_tokens for c in self.choices)},
        }

    def _feed(self, index: int, output: EngineOutput) -> Step[D] | None:
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return None
        before = len(choice.token_ids)
        delta = choice.feed(output)
        new_ids = choice.token_ids[before:]
        self._clocks[index].tokens(len(new_ids))
        if choice.finish_reason is not None:
            self._finished(index, choice, output.timing)
            if output.timing is not None and output.timing.first_token:
                timing = output.timing
                self._info.facts |= {
                    "queue_s": timing.scheduled - timing.arrival,
                    "prefill_s": timing.first_token - timing.scheduled,
                }
        return Step(index, delta, new_ids)

    def _finished(self, index: int, choice: Choice[D], timing: RequestTiming | None) -> None:
        if choice.stopped_early:
            self._generation.stop(index)
        self._metrics.recovered(choice.recoveries.items())
        if self.complete:
            self._metrics.answered(max(len(choice.token_ids) for choice in self.choices))
        self._clocks[index].finished(choice.finish_reason or "", len(choice.token_ids), timing)


async def with_keep_alive(
    events: AsyncIterator[bytes], period: float, comment: bytes, *, after: int = 0
) -> AsyncIterator[bytes]:
    """`events`, with `comment` every `period` seconds until the first one after `after` of them comes."""
    for _ in range(after):
        yield await anext(events)
    first = asyncio.ensure_future(anext(events))
    try:
        while not (await asyncio.wait({first}, timeout=period))[0]:
            yield comment
        yield await first
    finally:
        first.cancel()
    async for event in events:
        yield event
