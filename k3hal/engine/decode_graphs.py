"""Graphs of steps that decode and do nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from k3hal.dispatch.host_lengths import telling
from k3hal.engine.batch import with_late_tokens
from k3hal.engine.graphs import Around, GraphLimits, StepGraphs
from k3hal.engine.staging import Layout
from k3hal.engine.step_plan import StepPlan
from k3hal.model.batch import DecodeBatch, StepBatch


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


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a replay leaves until the next: `logits` fp32 [N, V], and `tokens` int64 [N] as of `Sampler.pick`."""

    logits: Tensor
    tokens: Tensor


class DecodeGraphs(StepGraphs):
    """Metadata, forward pass, logits and likeliest tokens of sequences with one token each."""

    label = "decoding"

    def __init__(self, around: Around, limits: GraphLimits) -> None:
        super().__init__(around, limits, limits.max_num_seqs, 1)

    def fits(self, plan: StepPlan) -> bool:
        """Whether a step has a graph."""
        return plan.num_decodes == plan.num_seqs and self._holds(plan)

    def run(self, plan: StepPlan, begins: Callable[[], None] | None = None) -> Decoded:
        """Queue a step that fits; `begins` is called before anything is queued."""
        captured = self._bucket(plan)
        rows = np.full(captured.batch, self._around.sampler.spare_row, np.int64)
        rows[: plan.num_seqs] = plan.rows
        arrays = (plan.token_ids, rows, plan.context_lens, plan.new_lens, plan.slots, plan.page_table)
        self._send(captured, arrays, begins)
        known = np.zeros(captured.batch, np.int64)
        known[: plan.num_seqs] = plan.context_lens + plan.new_lens
        with telling(known.tolist()):
            captured.graphs[0].replay()
        self.replays += 1
        assert self._logits is not None
        return Decoded(self._logits[: plan.num_seqs], self._tokens[: plan.num_seqs])

    def _layout(self, batch: int, width: int) -> Layout:
        wide, narrow = (np.int64, (batch,)), (np.int32, (batch,))
        return Layout.of(wide, wide, narrow, narrow, narrow, (np.int32, (batch, width)))

    def _padding(self, batch: int) -> tuple[np.ndarray, ...]:
        none, spare = np.zeros(0, np.int32), np.full(batch, self._around.sampler.spare_row, np.int64)
        return np.arange(batch, dtype=np.int64), spare, none, none, none, np.zeros((batch, 0), np.int32)

    def _parts(self, inputs: Sequence[Tensor]) -> tuple[Callable[[], None], ...]:
        return (lambda: self._decode(Inputs(*inputs)),)

    def _decode(self, inputs: Inputs) -> None:
        around, batch = self._around, inputs.token_ids.shape[0]
        _, kv_rows, _, seq_lens = around.step_metadata(
            inputs.context_lens, inputs.new_lens, inputs.page_table, around.page_tokens, batch
        )
        token_ids = with_late_tokens(inputs.token_ids, around.sampler.last_tokens(inputs.rows))
        decode = DecodeBatch(inputs.slots, inputs.page_table, seq_lens)
        step = StepBatch(token_ids, kv_rows, self._every_row[:batch], decode, None)
        logits = self._logits_of(around.model.forward(step, around.views))
        self._tokens[:batch].copy_(around.sampler.pick(logits, inputs.rows))
