"""Captured graphs of steps: one copy to the device and one replay instead of hundreds of launches."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.host_lengths import telling
from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.runtime import DeviceRuntime, Graph
from k3hal.engine.sampler import Sampler
from k3hal.engine.staging import Layout, Staging
from k3hal.engine.step_model import StepModel
from k3hal.engine.step_plan import StepPlan
from k3hal.errors import BackendError
from k3hal.model.batch import CacheViews
from k3hal.model.progress import progress_bar

logger = logging.getLogger(__name__)

_OUTSIDE = ("copy_pages", "sample")
"""Operators of a step that no graph holds."""
_SMALL_BATCHES = (1, 2, 4, 8, 16, 24, 32)
LEAST_WIDTH = 36
"""Pages of the narrowest page table: of 128 tokens, a context of 4096 and half a thousand more."""
_WIDER = 8
"""How many times as wide the next page table is."""
_WORST_REPLAY = 0.02
"""Largest distance of a row's logits between the first replay and the same work without a graph, as a share of their
length: a library may take another kernel while work is captured, whose sums are rounded otherwise."""


def batch_buckets(most: int) -> list[int]:
    """The batches that graphs are captured for, up to `most` sequences: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 ..."""
    buckets, size = list(_SMALL_BATCHES), 32
    while buckets[-1] < most:
        buckets += [size * 3 // 2, size * 2]
        size *= 2
    return [*(bucket for bucket in buckets if bucket < most), most]


def width_buckets(most: int, least: int = LEAST_WIDTH) -> list[int]:
    """The widths of page tables that graphs are captured for, up to `most` pages.

    From the width follow grids and scratch memory of attention, so that short contexts have a graph of their own.
    """
    widths = [least]
    while widths[-1] < most:
        widths.append(widths[-1] * _WIDER)
    return [*(width for width in widths if width < most), most]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Up to how many sequences, and pages of one, a step that decodes has a graph; `least_width` pages are the fewest
    that one is made for. With `drafts`, the most that a sequence takes along, steps that verify have graphs too."""

    max_num_seqs: int
    max_pages: int
    least_width: int = LEAST_WIDTH
    drafts: int = 0


def not_capturable(plan: DispatchPlan) -> list[str]:
    """What decoding would run that may not be captured, as operator=provider."""
    decoding = [e for e in plan.entries if e.request.phase != "prefill" and e.request.op not in _OUTSIDE]
    return sorted({f"{e.request.op}={e.decision.provider}" for e in decoding if not e.decision.graph_safe})


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of a bucket, replayed one after the other, and how their inputs lie in their buffer."""

    batch: int
    layout: Layout
    graphs: tuple[Graph, ...]


@dataclass(frozen=True, slots=True)
class Around:
    """What graphs are captured over and replayed with."""

    model: StepModel
    views: CacheViews
    step_metadata: Callable[..., Any]
    page_tokens: int
    sampler: Sampler
    staging: Staging
    runtime: DeviceRuntime


class StepGraphs(ABC):
    """Graphs of one kind of step, one for each bucket of (sequences, pages of the longest).

    All share one input buffer, which the stream's order protects: it is overwritten when the replay before has read it.
    What a sequence gets does not depend on its row, its neighbours or padding any more than it does without graphs:
    operators promise that rows are independent, and a product's rounding may change with the number of rows.
    """

    label: ClassVar[str]

    def __init__(self, around: Around, limits: GraphLimits, most: int, rows: int) -> None:
        """`most` sequences at once, `rows` tokens of each."""
        self._around, self._rows, self._most = around, rows, most
        self._widths = width_buckets(limits.max_pages, limits.least_width)
        self._batches: list[int] = []
        self._graphs: dict[tuple[int, int], Captured] = {}
        device = around.staging.device
        size = self._layout(most, limits.max_pages).size
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._tokens = torch.zeros(most * rows, dtype=torch.int64, device=device)
        self._every_row = torch.arange(most * rows, device=device)
        self._logits: Tensor | None = None
        self.replays = 0

    @abstractmethod
    def _layout(self, batch: int, width: int) -> Layout:
        """How a bucket's inputs lie in the buffer."""

    @abstractmethod
    def _padding(self, batch: int) -> tuple[np.ndarray, ...]:
        """The inputs of so many sequences that are all padding."""

    @abstractmethod
    def _parts(self, inputs: Sequence[Tensor]) -> tuple[Callable[[], None], ...]:
        """The work of a step from its inputs to `_logits` and `_tokens`, in the parts that are captured each by itself.

        No shape in it depends on a value.
        """

    @torch.inference_mode()
    def prepare(self, buckets: Sequence[int] | None = None, pool: Any = None) -> None:
        """Capture every bucket, the largest first, so that the others find their memory there.

        Raises `BackendError` when the first replay of a graph does not give what the same work gave without it.
        """
        batches = sorted(buckets if buckets is not None else batch_buckets(self._most))
        if not batches or batches[0] < 1 or batches[-1] > self._most:
            raise ValueError(f"graphs for {batches} sequences, of 1 to {self._most}")
        pool = self._around.runtime.graph_pool() if pool is None else pool
        wanted = [(batch, width) for width in reversed(self._widths) for batch in reversed(batches)]
        with progress_bar(f"capturing graphs for {self.label}", len(wanted), steps=True) as progress:
            for batch, width in wanted:
                self._graphs[batch, width] = self._capture(batch, width, pool)
                if progress:
                    progress(1)
        self._batches = batches
        logger.info("captured %d graphs for %s", len(self._graphs), self.label)

    def _holds(self, plan: StepPlan) -> bool:
        """Whether a bucket is large enough for a step."""
        room = self._batches and 0 < plan.num_seqs <= self._batches[-1]
        return bool(room and plan.page_table.shape[1] <= self._widths[-1])

    def _bucket(self, plan: StepPlan) -> Captured:
        batch = self._batches[bisect_left(self._batches, plan.num_seqs)]
        return self._graphs[batch, self._widths[bisect_left(self._widths, plan.page_table.shape[1])]]

    def _send(self, captured: Captured, arrays: Sequence[np.ndarray], begins: Callable[[], None] | None) -> None:
        """Queue the copy of a step's inputs; `begins` is called before anything is queued."""
        staging = self._around.staging
        packed = staging.pack(captured.layout, arrays)
        if begins:
            begins()
        staging.send(packed, self._buffer, captured.layout)

    def _capture(self, batch: int, width: int, pool: Any) -> Captured:
        layout, runtime, count = self._layout(batch, width), self._around.runtime, batch * self._rows
        parts = self._parts(layout.tensors(self._buffer))
        self._send(Captured(batch, layout, ()), self._padding(batch), None)
        with telling([0] * batch):
            for part in parts:
                part()
            assert self._logits is not None
            expected, picked = self._logits[:count].clone(), self._tokens[:count].clone()
            graphs = tuple(runtime.capture(part, pool) for part in parts)
            self._logits.fill_(torch.nan)
            self._tokens.fill_(-1)
            for graph in graphs:
                graph.replay()
        self._check(batch, width, expected, picked)
        return Captured(batch, layout, graphs)

    def _logits_of(self, hidden: Tensor) -> Tensor:
        """Logits of as many rows, also kept until the next replay."""
        logits = self._around.model.logits(hidden)
        if self._logits is None:
            self._logits = logits.new_empty(self._most * self._rows, logits.shape[1])
        self._logits[: logits.shape[0]].copy_(logits)
        return logits

    def _check(self, batch: int, width: int, expected: Tensor, picked: Tensor) -> None:
        """Compare what the first replay left with what the same work gave without a graph."""
        assert self._logits is not None
        count = expected.shape[0]
        logits = self._logits[:count]
        same = bool((torch.isfinite(logits) == torch.isfinite(expected)).all())
        wanted = torch.nan_to_num(expected)
        apart = (torch.nan_to_num(logits) - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
        worst = float(apart.max())
        # Tokens of rows whose logits are finite differ only where two are nearly as likely.
        chosen = bool(((self._tokens[:count] < 0) == (picked < 0)).all())
        if not (same and chosen and worst <= _WORST_REPLAY):
            raise BackendError(
                f"the graph for {self.label} with {batch} sequences of {width} pages gives other logits than the same "
                f"work without it: a row is {worst:.3g} of its length away",
                hint="use --no-graphs, and --ops for other providers; `k3hal conform run` finds which one it is",
            )
