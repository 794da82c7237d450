"""Fitting an engine into a device's memory: what it takes is measured before the cache gets the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from k3hal.dispatch.runtime import DeviceRuntime
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.memory import MemoryPlan, Needs, gb, margin_for
from k3hal.engine.warmup import Runner, Sizes, Trial, trials
from k3hal.errors import CapacityError
from k3hal.model.progress import progress_bar

logger = logging.getLogger(__name__)

_FEWER_GRAPHS = "lower --max-num-seqs, give --no-graphs, or raise --memory-budget"

_FEW_RUNS = 3
"""Runs of an arena that steps can be tried on: the null run, one of pages, one of a state."""


class Gauge:
    """Bytes that are taken of a device from when this is made on, by tensors and beside them."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        runtime.reset_peak()
        self._start = runtime.memory()
        self.counted = self._start.held is not None

    @property
    def free(self) -> int:
        """Free bytes at the start."""
        return self._start.free

    def held(self) -> int:
        """Bytes of tensors, and of what is kept for the next ones."""
        return (self._runtime.memory().held or 0) - (self._start.held or 0)

    def peak(self) -> int:
        """Most bytes of tensors since `restart`."""
        return (self._runtime.memory().peak or 0) - (self._start.held or 0)

    def outside(self) -> int:
        """Bytes taken by other things than tensors. Other processes' count too where they share the device."""
        return max(self._start.free - self._runtime.memory().free - self.held(), 0)

    def restart(self) -> None:
        self._runtime.reset_peak()

    def settle(self) -> None:
        """Let go of what nobody refers to any more, so that what is held is what is in use."""
        if self.counted:
            gc.collect()
        self.restart()

    def limit(self, num_bytes: int | None) -> None:
        """Let tensors hold no more than `num_bytes`; None takes the limit away. Nothing where nobody counts."""
        if self.counted:
            most = self._start.total if num_bytes is None else (self._start.held or 0) + max(num_bytes, 0)
            self._runtime.limit(most)


R = TypeVar("R", bound=Runner)


class Fitting(Generic[R]):
    """Makes an engine's runner over a cache as large as the device truly has room for.

    `make` makes a runner over an arena for sequences of so many tokens, `replan` a plan from what is needed. `prepare`
    captures a runner's graphs. With `try_out` the largest steps run first, and an engine that could run out of memory
    under traffic is refused.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        gauge: Gauge,
        estimate: MemoryPlan,
        replan: Callable[[Needs], MemoryPlan],
        make: Callable[[CacheArena, int], R],
        prepare: Callable[[R], None] | None = None,
        *,
        try_out: bool,
    ) -> None:
        self._runtime, self._gauge = runtime, gauge
        self._estimate, self._replan = estimate, replan
        self._make, self._prepare = make, prepare
        self._try_out = try_out

    def fit(self, sizes: Sizes) -> tuple[R, MemoryPlan]:
        """The runner and the final plan; those of `sizes` that a plan gives are taken from there.

        The weights are loaded by now. Raises `CapacityError`, naming the GB and the flag that matters.
        """
        gauge, plan = self._gauge, self._estimate
        if gauge.counted:
            gauge.settle()
            gauge.limit(plan.budget)
            needs = replace(plan.needs, **_measured(plan.needs, weights=gauge.held()))
            plan = self._replan(self._measure(sizes, replace(plan, needs=needs)) if self._try_out else needs)
        runner, plan = self._over_the_rest(sizes, plan)
        if gauge.counted and plan.needs.margin < margin_for(plan.needs.workspace) // 2:
            # Graphs took more than was thought: the cache gets what they leave.
            del runner
            gauge.settle()
            plan = self._replan(replace(plan.needs, margin=margin_for(plan.needs.workspace)))
            runner, plan = self._over_the_rest(sizes, plan)
        if plan.needs.margin < 0:
            raise CapacityError(
                f"the graphs of the decode batches take {gb(plan.needs.graphs)}, {gb(-plan.needs.margin)} more than "
                f"the budget of {gb(plan.budget)} has left",
                hint=_FEWER_GRAPHS,
            )
        gauge.limit(plan.budget - max(gauge.outside(), plan.needs.code))
        return runner, plan

    def _over_the_rest(self, sizes: Sizes, plan: MemoryPlan) -> tuple[R, MemoryPlan]:
        """A runner over the whole cache, which has been tried, and the plan with its graphs."""
        self._gauge.limit(plan.budget - plan.needs.code)
        runner = self._make(CacheArena(sizes.layout, self._runtime.allocate(plan.cache)), plan.max_model_len)
        if self._try_out:
            self._gauge.restart()
            self._run(runner, _planned(sizes, plan), plan)
        if self._prepare is not None:
            plan = self._capture(runner, self._prepare, plan)
        return runner, plan

    def _measure(self, sizes: Sizes, plan: MemoryPlan) -> Needs:
        """What the largest steps take, over an arena of a few runs; what they leave behind stays."""
        gauge, layout = self._gauge, sizes.layout
        # No sequence will be longer, and no cache larger, than if steps took nothing.
        sizes = _planned(sizes, self._replan(Needs(weights=plan.weights, workspace=0)))
        memory = self._runtime.allocate(_FEW_RUNS * layout.run_bytes)
        runner, before, peak, batch = self._make(CacheArena(layout, memory), sizes.max_model_len), gauge.held(), 0, 0
        for trial in _shown(trials(sizes, arena_runs=_FEW_RUNS)):
            gauge.restart()
            held = gauge.held()
            with _refusal(trial, plan, before):
                runner.execute(trial.plan)
            peak = max(peak, gauge.peak())
            batch = gauge.peak() - held
        del runner, memory
        gauge.settle()
        buffers = max(gauge.held() - plan.weights, 0)
        workspace = max(peak - before - buffers, 0)
        graphs = plan.needs.graphs and max(plan.needs.graphs, batch)
        figures = {"workspace": workspace, "buffers": buffers, "code": gauge.outside()}
        return replace(plan.needs, graphs=graphs, margin=margin_for(workspace), **_measured(plan.needs, **figures))

    def _run(self, runner: R, sizes: Sizes, plan: MemoryPlan) -> None:
        """The largest steps over the whole cache."""
        for trial in _shown(trials(sizes)):
            with _refusal(trial, plan, plan.weights + plan.cache):
                runner.execute(trial.plan)

    def _capture(self, runner: R, prepare: Callable[[R], None], plan: MemoryPlan) -> MemoryPlan:
        """The plan with what the captured graphs of a runner take: out of the margin what is more than was thought."""
        gauge = self._gauge
        gauge.restart()
        held, outside = gauge.held(), gauge.outside()
        try:
            prepare(runner)
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            left = plan.budget - plan.needs.code - plan.weights - plan.needs.buffers - plan.cache
            raise CapacityError(
                f"the graphs of the decode batches do not fit the {gb(left)} that weights of {gb(plan.weights)} and "
                f"the cache leave of the budget of {gb(plan.budget)}",
                hint=_FEWER_GRAPHS,
            ) from None
        gauge.restart()
        if not gauge.counted:
            return plan
        beside = max(gauge.outside() - outside, 0)
        taken = max(gauge.held() - held, 0) + beside
        logger.info("graphs take %s, %s of it beside tensors", gb(taken), gb(beside))
        needs = replace(plan.needs, **_measured(plan.needs, graphs=taken))
        missing = max(needs.total + plan.cache - plan.budget, 0)
        return replace(plan, needs=replace(needs, margin=needs.margin - missing))


def _shown(steps: Iterable[Trial]) -> Iterator[Trial]:
    """The steps, with a bar for a person of how many have run."""
    every = list(steps)
    with progress_bar("trying the largest steps", len(every), steps=True) as progress:
        for step in every:
            yield step
            if progress:
                progress(1)


def _planned(sizes: Sizes, plan: MemoryPlan) -> Sizes:
    return replace(sizes, max_model_len=plan.max_model_len, num_runs=plan.num_runs)


def _measured(needs: Needs, **figures: int) -> dict[str, Any]:
    """Changes to `needs`: figures by name, and that they were measured."""
    return {**figures, "measured": needs.measured | frozenset(figures)}


def _ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, or that led to the error: the end of a capture that failed fails, too."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _refusal(trial: Trial, plan: MemoryPlan, taken: int) -> Iterator[None]:
    """Say of memory that ran out in a step which step that was, how much there was, and what would help."""
    try:
        yield
    except RuntimeError as error:
        if not _ran_out(error):
            raise
        left = max(plan.budget - taken, 0)
        raise CapacityError(
            f"{trial.name} needs more than the {gb(left)} that weights of {gb(plan.weights)} and the cache leave of "
            f"the budget of {gb(plan.budget)}",
            hint=f"lower {trial.flag}, or raise --memory-budget",
        ) from None
