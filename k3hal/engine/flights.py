"""Steps under way: planned, handed to the runner, and not yet answered."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, cast

from k3hal.engine.request import Request
from k3hal.engine.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What executes plans: a model, or a stand-in that checks the plans themselves."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class LaunchingRunner(Runner, Protocol):
    """A runner that may queue steps on a device which works while the host goes on."""

    @property
    def asynchronous(self) -> bool:
        """Whether it does."""
        ...

    def launch(self, plan: StepPlan) -> Answer: ...


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

    runner: Runner
    plan: StepPlan

    def result(self) -> StepResult:
        return self.runner.execute(self.plan)


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that could not be launched."""

    error: BaseException

    def result(self) -> StepResult:
        raise self.error


class Flights:
    """At most `depth` steps, run one after the other in the order in which they came.

    Steps of a runner that launches are queued on its device at once. Those of others run, with a depth of one, when
    their answer is asked for, on the caller's thread; otherwise a thread runs them, so that the next is planned
    meanwhile. Once a step failed, those behind it are not run: they were planned on its success.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._queue: deque[Flight] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._failed = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._queue)

    def start(self, runner: Runner, plan: StepPlan, requests: list[Request]) -> None:
        """Add a step. What goes wrong while it is launched is raised by its answer."""
        self._queue.append(Flight(plan, requests, self._answer(runner, plan)))

    def _answer(self, runner: Runner, plan: StepPlan) -> Answer:
        if getattr(runner, "asynchronous", False):
            return self._launch(cast(LaunchingRunner, runner), plan)
        if self.depth == 1:
            return Later(runner, plan)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="k3hal-steps")
        return self._thread.submit(self._run, runner, plan)

    def land(self) -> Flight:
        """The oldest step, which is under way no longer. Its answer may be waited for."""
        return self._queue.popleft()

    def drop(self, *landed: Flight) -> list[Flight]:
        """`landed` and all steps behind it, none of which runs any more: those that do are waited for."""
        behind = list(self._queue)
        self._queue.clear()
        self._failed = True
        try:
            wait([one.answer for one in (*landed, *behind) if isinstance(one.answer, Future)])
            for flight in behind:
                _end(flight)
        finally:
            self._failed = False
        return [*landed, *behind]

    def close(self) -> None:
        """Run nothing more; what runs is waited for."""
        for flight in self._queue:
            _end(flight)
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _launch(self, runner: LaunchingRunner, plan: StepPlan) -> Answer:
        if self._failed:
            return Failed(RuntimeError(_BEFORE))
        try:
            return runner.launch(plan)
        except BaseException as error:  # noqa: BLE001 - raised where the answer is asked for
            self._failed = True
            return Failed(error)

    def _run(self, runner: Runner, plan: StepPlan) -> StepResult:
        if self._failed:
            raise RuntimeError(_BEFORE)
        try:
            return runner.execute(plan)
        except BaseException:
            self._failed = True
            raise


def _end(flight: Flight) -> None:
    """Wait until a step that was launched runs no longer, whatever comes of it."""
    if not isinstance(flight.answer, Later | Failed | Future):
        try:
            flight.answer.result()
        except Exception as error:  # noqa: BLE001 - its requests end with the failure before it
            logger.warning("step %d ended with one before it: %s", flight.plan.epoch, error)


_BEFORE = "a step before this one failed"
