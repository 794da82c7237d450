"""Steps under way: planned, handed to the runner, and not yet answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from k3hal.engine.request import Request
from k3hal.engine.step_plan import StepPlan, StepResult

Execute = Callable[[StepPlan], StepResult]


class Answer(Protocol):
    """What a step will have sampled."""

    def result(self) -> StepResult:
        """Wait for it. Raises whatever the runner raised."""
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A step, its sequences in the plan's order, and the answer to come."""

    plan: StepPlan
    requests: list[Request]
    answer: Answer


@dataclass(frozen=True, slots=True)
class Later:
    """A step that runs when it is asked for."""

    execute: Execute
    plan: StepPlan

    def result(self) -> StepResult:
        return self.execute(self.plan)


class Flights:
    """At most `depth` steps, run one after the other in the order in which they came.

    With a depth of one a step runs when its answer is asked for, on the caller's thread. Otherwise a thread runs them,
    so that the next is planned meanwhile. Once a step failed, those behind it are not run: they were planned on its
    success.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._queue: deque[Flight] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="k3hal-steps") if depth > 1 else None
        self._failed = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._queue)

    def start(self, execute: Execute, plan: StepPlan, requests: list[Request]) -> None:
        self._queue.append(Flight(plan, requests, self._answer(execute, plan)))

    def _answer(self, execute: Execute, plan: StepPlan) -> Answer:
        if self._thread is None:
            return Later(execute, plan)
        return self._thread.submit(self._run, execute, plan)

    def land(self) -> Flight:
        """The oldest step, which is under way no longer. Its answer may be waited for."""
        return self._queue.popleft()

    def drop(self, *landed: Flight) -> list[Flight]:
        """`landed` and all steps behind it, none of which runs any more: those that do are waited for."""
        flights = [*landed, *self._queue]
        self._queue.clear()
        self._failed = True
        wait([flight.answer for flight in flights if isinstance(flight.answer, Future)])
        self._failed = False
        return flights

    def close(self) -> None:
        """Run nothing more; what runs is waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, execute: Execute, plan: StepPlan) -> StepResult:
        if self._failed:
            raise RuntimeError("a step before this one failed")
        try:
            return execute(plan)
        except BaseException:
            self._failed = True
            raise
