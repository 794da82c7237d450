"""The memory of one engine on one device, from what is thought before to what is measured after loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from k3hal.dispatch.observe import must_see_every_call
from k3hal.dispatch.runtime import DeviceRuntime
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.fit import Fitting, Gauge
from k3hal.engine.graphs import GraphLimits, batch_buckets, width_buckets
from k3hal.engine.memory import CODE, GB, MemoryPlan, Needs, estimated_needs, gb, plan_memory
from k3hal.engine.options import EngineOptions
from k3hal.engine.verify_graphs import most_verified
from k3hal.engine.warmup import Runner, Sizes
from k3hal.errors import CapacityError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.generated import GeneratedModel

T = TypeVar("T")
R = TypeVar("R", bound=Runner)


class Room:
    """What a checkpoint gets of a device. Made before anything is loaded; raises `CapacityError` if that cannot fit.

    `estimate` is the plan then, `tokens` the most of a step.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | GeneratedModel,
        layout: CacheLayout,
        options: EngineOptions,
        runtime: DeviceRuntime,
        dtype: torch.dtype,
        *,
        graphs: bool,
    ) -> None:
        self._config, self._layout, self._options, self._runtime = checkpoint.config, layout, options, runtime
        self._on_cpu = runtime.device.vendor == "cpu"
        self.tokens = options.batched_tokens(on_cpu=self._on_cpu)
        self._gauge = Gauge(runtime)
        self.estimate = self._plan(
            estimated_needs(
                checkpoint.config,
                weight_bytes(checkpoint, dtype),
                dtype.itemsize,
                self.tokens,
                options.num_seqs,
                counted=self._gauge.counted,
                num_graphs=self._num_graphs() if graphs else 0,
                drafts=options.num_drafts,
            )
        )

    def load(self, read: Callable[[], T]) -> T:
        """What `read` gives, which may take no more than the budget. Raises `CapacityError` as well."""
        budget = self.estimate.budget
        self._gauge.limit(budget - CODE)
        try:
            return read()
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"loading the weights, {gb(self.estimate.weights)}, takes more than the budget of {gb(budget)}",
                hint="raise --memory-budget",
            ) from None

    def fit(self, make: Callable[[CacheArena, int], R], prepare: Callable[[R], None]) -> tuple[R, MemoryPlan]:
        """A runner over an arena that fits what is left, and the final plan; `Fitting` says what is given.

        Raises `CapacityError`.
        """
        options = self._options
        watched = must_see_every_call()  # who sees them would take the trials' sequences for real ones
        wanted = options.warm_up == "full" or (options.warm_up == "auto" and self._gauge.counted)
        fitting = Fitting(
            self._runtime, self._gauge, self.estimate, self._plan, make, prepare, try_out=wanted and not watched
        )
        return fitting.fit(
            Sizes(
                max_num_seqs=options.num_seqs,
                max_num_batched_tokens=self.tokens,
                max_model_len=self.estimate.max_model_len,
                vocab_size=self._config.vocab_size,
                layout=self._layout,
                num_runs=self.estimate.num_runs,
                drafts=options.num_drafts,
            )
        )

    def release(self) -> None:
        """The engine is no more: others may have what it could take."""
        self._gauge.limit(None)

    def _num_graphs(self) -> int:
        longest = self._options.max_model_len or self._config.max_position_embeddings
        limits = GraphLimits(self._options.num_seqs, self._layout.pages_for(longest), drafts=self._options.num_drafts)
        # Of each that verifies there are two.
        batches = len(batch_buckets(limits.max_num_seqs))
        batches += 2 * len(batch_buckets(most_verified(limits))) if limits.drafts else 0
        return batches * len(width_buckets(limits.max_pages))

    def _plan(self, needs: Needs) -> MemoryPlan:
        budget = self._options.memory_budget
        return plan_memory(
            self._config,
            self._layout,
            needs,
            free=self._gauge.free,
            budget=None if budget is None else int(budget * GB),
            on_cpu=self._on_cpu,
            max_model_len=self._options.max_model_len,
            max_num_seqs=self._options.num_seqs,
        )


def weight_bytes(checkpoint: Checkpoint | GeneratedModel, dtype: torch.dtype) -> int:
    """Bytes the text tensors take in memory: what is stored in BF16 becomes `dtype`, the rest keeps its kind."""
    return sum(
        spec.nbytes * dtype.itemsize // 2 if spec.dtype == "BF16" else spec.nbytes for spec in checkpoint.specs.values()
    )
