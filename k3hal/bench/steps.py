"""When what happens inside a step of our engine, by thin wrappers around its runner and its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from k3hal.engine.core import Runner
from k3hal.engine.step_model import StepModel
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.model.batch import CacheViews, StepBatch
from k3hal.model.k3 import K3Model
from k3hal.model.moe import MoE

PARTS = ("scheduling", "batch", "forward", "sampling", "output")


@dataclass(slots=True)
class Step:
    """The moments of one step in seconds of the process's clock, and what it worked on.

    `begin`, then the scheduler; `planned`, then the batch's tensors; `built`, then the model with its head; `computed`,
    then sampling; `sampled`, then appending, detokenising and handing out; `end`. `context` sums the sequences' lengths
    after the step; `experts` counts the experts touched, over all layers, where they were counted.
    """

    num_seqs: int
    num_decodes: int
    context: int
    begin: float = 0.0
    planned: float = 0.0
    built: float = 0.0
    computed: float = 0.0
    sampled: float = 0.0
    end: float = 0.0
    experts: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def parts(self) -> dict[str, float]:
        """Seconds of each of `PARTS`; they add up to the step."""
        moments = (self.begin, self.planned, self.built, self.computed, self.sampled, self.end)
        return {name: moments[i + 1] - moments[i] for i, name in enumerate(PARTS)}


class TimedModel:
    """A model that notes when it is called and when it is done."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.called = self.done = 0.0

    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        self.called = time.perf_counter()
        hidden = self.model.forward(batch, cache, aux_layers)
        self.done = time.perf_counter()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        self.done = time.perf_counter()
        return logits


class TimedRunner:
    """A runner that keeps a `Step` of the last plan it executed; `model` must be the runner's own."""

    def __init__(self, runner: Runner, model: TimedModel) -> None:
        self._runner = runner
        self._model = model
        self.counter: ExpertCounter | None = None
        self.last: Step | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        planned = time.perf_counter()
        result = self._runner.execute(plan)
        step = Step(plan.num_seqs, plan.num_decodes, int(plan.context_lens.sum() + plan.new_lens.sum()))
        step.planned, step.sampled = planned, time.perf_counter()
        step.built, step.computed = self._model.called, self._model.done
        step.experts = self.counter.take() if self.counter else 0
        self.last = step
        return result


class ExpertCounter:
    """Counts the distinct experts that the routers of a model pick. Costs time: never used in a timed run."""

    def __init__(self) -> None:
        self._count = 0

    def take(self) -> int:
        """Experts touched since the last call, each counted once a layer and forward pass."""
        count, self._count = self._count, 0
        return count

    @contextmanager
    def attached(self, model: StepModel) -> Iterator[None]:
        """Count what `model` routes within the block."""
        layers = model.layers if isinstance(model, K3Model) else []
        blocks = [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]
        routes = [block.route for block in blocks]
        for block, route in zip(blocks, routes, strict=True):
            block.route = self._counting(route)
        try:
            yield
        finally:
            for block, route in zip(blocks, routes, strict=True):
                block.route = route

    def _counting(self, route: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def counted(*args: object) -> tuple[Tensor, Tensor]:
            gate, ids = route(*args)
            self._count += int(ids[ids >= 0].unique().numel())
            return gate, ids

        return counted
