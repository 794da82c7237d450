"""Decoding through captured graphs: one copy to the device and one replay instead of hundreds of launches."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.runtime import DeviceRuntime, Graph
from k3hal.engine.batch import with_late_tokens
from k3hal.engine.sampler import Sampler
from k3hal.engine.staging import Layout, Staging
from k3hal.engine.step_plan import StepPlan
from k3hal.errors import BackendError
from k3hal.model.batch import CacheViews, DecodeBatch, StepBatch
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


class GraphModel(Protocol):
    """What is captured of a model."""

    def forward(self, batch: StepBatch, cache: CacheViews) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


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
    that one is made for."""

    max_num_seqs: int
    max_pages: int
    least_width: int = LEAST_WIDTH


def not_capturable(plan: DispatchPlan) -> list[str]:
    """What decoding would run that may not be captured, as operator=provider."""
    decoding = [e for e in plan.entries if e.request.phase != "prefill" and e.request.op not in _OUTSIDE]
    return sorted({f"{e.request.op}={e.decision.provider}" for e in decoding if not e.decision.graph_safe})


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a graph reads, views of one buffer: `token_ids` and `rows` int64 [B], `context_lens`, `new_lens` and `slots`
    int32 [B], `page_table` int32 [B, W].

    A padding row has the sampler's spare row, no tokens (`new_lens` 0, so that it writes no KV), slot 0 and pages 0.
    """

    token_ids: Tensor
    rows: Tensor
    context_lens: Tensor
    new_lens: Tensor
    slots: Tensor
    page_table: Tensor

    @staticmethod
    def layout(batch: int, width: int) -> Layout:
        wide, narrow = (np.int64, (batch,)), (np.int32, (batch,))
        return Layout.of(wide, wide, narrow, narrow, narrow, (np.int32, (batch, width)))


@dataclass(frozen=True, slots=True)
class Captured:
    """The graph of a bucket and how its inputs lie in their buffer."""

    batch: int
    layout: Layout
    graph: Graph


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a replay leaves until the next: `logits` fp32 [N, V], and `tokens` int64 [N] as of `Sampler.pick`."""

    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """One graph for each bucket of (sequences, pages of the longest): metadata, forward pass, logits, likeliest tokens.

    All share one input buffer, which the stream's order protects: it is overwritten when the replay before has read it.
    What a sequence gets does not depend on its row, its neighbours or padding any more than it does without graphs:
    operators promise that rows are independent, and a product's rounding may change with the number of rows.
    """

    def __init__(
        self,
        model: GraphModel,
        views: CacheViews,
        step_metadata: Callable[..., Any],
        page_tokens: int,
        sampler: Sampler,
        staging: Staging,
        runtime: DeviceRuntime,
        limits: GraphLimits,
    ) -> None:
        self._model, self._views, self._sampler = model, views, sampler
        self._step_metadata, self._page_tokens = step_metadata, page_tokens
        self._staging, self._runtime = staging, runtime
        self._max_num_seqs = max_num_seqs = limits.max_num_seqs
        self._widths = width_buckets(limits.max_pages, limits.least_width)
        self._batches: list[int] = []
        self._graphs: dict[tuple[int, int], Captured] = {}
        size = Inputs.layout(max_num_seqs, limits.max_pages).size
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=staging.device)
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=staging.device)
        self._every_row = torch.arange(max_num_seqs, device=staging.device)
        self._logits: Tensor | None = None
        self.replays = 0

    @torch.inference_mode()
    def prepare(self, buckets: Sequence[int] | None = None) -> None:
        """Capture every bucket, the largest first, so that the others find their memory there.

        Raises `BackendError` when the first replay of a graph does not give what the same work gave without it.
        """
        batches = sorted(buckets if buckets is not None else batch_buckets(self._max_num_seqs))
        if not batches or batches[0] < 1 or batches[-1] > self._max_num_seqs:
            raise ValueError(f"graphs for {batches} sequences, of 1 to {self._max_num_seqs}")
        pool = self._runtime.graph_pool()
        wanted = [(batch, width) for width in reversed(self._widths) for batch in reversed(batches)]
        with progress_bar("capturing graphs", len(wanted), steps=True) as progress:
            for batch, width in wanted:
                self._graphs[batch, width] = self._capture(batch, width, pool)
                if progress:
                    progress(1)
        self._batches = batches
        logger.info("captured %d graphs for decoding", len(self._graphs))

    def fits(self, plan: StepPlan) -> bool:
        """Whether a step has a graph: one that decodes and does nothing else."""
        decodes = plan.num_decodes == plan.num_seqs > 0
        room = self._batches and plan.num_seqs <= self._batches[-1]
        return bool(decodes and room and plan.page_table.shape[1] <= self._widths[-1])

    def run(self, plan: StepPlan, begins: Callable[[], None] | None = None) -> Decoded:
        """Queue a step that fits; `begins` is called before anything is queued."""
        batch = self._batches[bisect_left(self._batches, plan.num_seqs)]
        width = self._widths[bisect_left(self._widths, plan.page_table.shape[1])]
        captured = self._graphs[batch, width]
        rows = np.full(batch, self._sampler.spare_row, np.int64)
        rows[: plan.num_seqs] = plan.rows
        arrays = (plan.token_ids, rows, plan.context_lens, plan.new_lens, plan.slots, plan.page_table)
        packed = self._staging.pack(captured.layout, arrays)
        if begins:
            begins()
        self._staging.send(packed, self._buffer, captured.layout)
        captured.graph.replay()
        self.replays += 1
        assert self._logits is not None
        return Decoded(self._logits[: plan.num_seqs], self._tokens[: plan.num_seqs])

    def _capture(self, batch: int, width: int, pool: Any) -> Captured:
        layout = Inputs.layout(batch, width)
        inputs = Inputs(*layout.tensors(self._buffer))

        def work() -> None:
            self._decode(inputs)

        padding = np.zeros(0, np.int32)
        spare = np.full(batch, self._sampler.spare_row, np.int64)
        tokens = np.arange(batch, dtype=np.int64)
        table = np.zeros((batch, 0), np.int32)
        packed = self._staging.pack(layout, (tokens, spare, padding, padding, padding, table))
        self._staging.send(packed, self._buffer, layout)
        work()
        assert self._logits is not None
        expected, picked = self._logits[:batch].clone(), self._tokens[:batch].clone()
        graph = self._runtime.capture(work, pool)
        self._logits.fill_(torch.nan)
        self._tokens.fill_(-1)
        graph.replay()
        self._check(batch, width, expected, picked)
        return Captured(batch, layout, graph)

    def _decode(self, inputs: Inputs) -> None:
        """The work of a step, from the input buffer to `_logits` and `_tokens`; no shape depends on a value."""
        batch = inputs.token_ids.shape[0]
        _, kv_rows, _, seq_lens = self._step_metadata(
            inputs.context_lens, inputs.new_lens, inputs.page_table, self._page_tokens, batch
        )
        token_ids = with_late_tokens(inputs.token_ids, self._sampler.last_tokens(inputs.rows))
        decode = DecodeBatch(inputs.slots, inputs.page_table, seq_lens)
        step = StepBatch(token_ids, kv_rows, self._every_row[:batch], decode, None)
        logits = self._model.logits(self._model.forward(step, self._views))
        if self._logits is None:
            self._logits = logits.new_empty(self._max_num_seqs, logits.shape[1])
        self._logits[:batch].copy_(logits)
        self._tokens[:batch].copy_(self._sampler.pick(logits, inputs.rows))

    def _check(self, batch: int, width: int, expected: Tensor, picked: Tensor) -> None:
        """Compare what the first replay left with what the same work gave without a graph."""
        assert self._logits is not None
        logits = self._logits[:batch]
        same = bool((torch.isfinite(logits) == torch.isfinite(expected)).all())
        wanted = torch.nan_to_num(expected)
        apart = (torch.nan_to_num(logits) - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
        worst = float(apart.max())
        # Tokens of rows whose logits are finite differ only where two are nearly as likely.
        chosen = bool(((self._tokens[:batch] < 0) == (picked < 0)).all())
        if not (same and chosen and worst <= _WORST_REPLAY):
            raise BackendError(
                f"the graph for {batch} sequences of {width} pages gives other logits than the same work without it: "
                f"a row is {worst:.3g} of its length away",
                hint="use --no-graphs, and --ops for other providers; `k3hal conform run` finds which one it is",
            )
