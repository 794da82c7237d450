"""Graphs of steps that verify drafts: every sequence has the same number of rows, some of which are padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.batch import with_late_tokens
from k3hal.engine.graphs import Around, GraphLimits, StepGraphs
from k3hal.engine.staging import Layout
from k3hal.engine.step_model import VerifyingModel
from k3hal.engine.step_plan import StepPlan
from k3hal.model.batch import StepBatch, VerifyBatch

_LEAST_ROWS = 64
"""Rows of the largest batch, where the largest that decodes has less. Beyond, drafts cost more than they save."""


def most_verified(limits: GraphLimits) -> int:
    """Up to how many sequences at once verify drafts in a graph: no more rows than the largest batch that decodes."""
    rows = max(limits.max_num_seqs, _LEAST_ROWS)
    return max(min(rows // (1 + limits.drafts), limits.max_num_seqs), 1)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a graph reads, views of one buffer: `token_ids` int64 [B, Q], `rows` int64 [B], `context_lens`, `new_lens`
    and `slots` int32 [B], `page_table` int32 [B, W].

    Of each sequence's Q tokens the first `new_lens` count. A padding sequence has the sampler's spare row, no tokens,
    slot 0 and pages 0.
    """

    token_ids: Tensor
    rows: Tensor
    context_lens: Tensor
    new_lens: Tensor
    slots: Tensor
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class Verified:
    """What a replay leaves until the next: `logits` fp32 [N, Q, V], and as of `Sampler.pick_drafts` `tokens` int64
    [N, Q] and `accepted` int64 [N]."""

    logits: Tensor
    tokens: Tensor
    accepted: Tensor


class VerifyGraphs(StepGraphs):
    """Metadata, forward pass, logits, likeliest tokens and how many drafts they are, of sequences with up to Q tokens;
    and, as a graph of its own, what keeps so many of them.

    A sequence without drafts is one that verifies none.
    """

    label = "verifying drafts"

    def __init__(self, around: Around, limits: GraphLimits) -> None:
        super().__init__(around, limits, most_verified(limits), 1 + limits.drafts)
        device, most = around.staging.device, self._most
        self._owners = torch.arange(most, device=device).repeat_interleave(self._rows)
        self._places = torch.arange(self._rows, dtype=torch.int32, device=device)
        self._bounds = torch.arange(most + 1, dtype=torch.int32, device=device) * self._rows
        self._accepted = torch.zeros(most, dtype=torch.int64, device=device)
        self._kept = torch.zeros(most, dtype=torch.int32, device=device)

    def fits(self, plan: StepPlan) -> bool:
        """Whether a step has a graph."""
        generates = plan.num_decodes + plan.num_verifies == plan.num_seqs
        return bool(plan.num_verifies and generates and self._holds(plan) and plan.new_lens.max() <= self._rows)

    def run(self, plan: StepPlan, begins: Callable[[], None] | None = None) -> Verified:
        """Queue a step that fits, but for `commit`; `begins` is called before anything is queued."""
        captured, count = self._bucket(plan), plan.num_seqs
        token_ids = np.zeros((captured.batch, self._rows), np.int64)
        token_ids[:count][np.arange(self._rows) < plan.new_lens[:, None]] = plan.token_ids
        rows = np.full(captured.batch, self._around.sampler.spare_row, np.int64)
        rows[:count] = plan.rows
        self._send(captured, (token_ids, rows, plan.context_lens, plan.new_lens, plan.slots, plan.page_table), begins)
        captured.graphs[0].replay()
        self.replays += 1
        assert self._logits is not None
        shape = (count, self._rows)
        end = count * self._rows
        return Verified(
            self._logits[:end].unflatten(0, shape), self._tokens[:end].unflatten(0, shape), self._accepted[:count]
        )

    def commit(self, plan: StepPlan, kept: Tensor | None = None) -> None:
        """Queue what leaves the states of the step run last as after the first `kept` int32 [N] tokens, by default
        those `run` found."""
        if kept is not None:
            self._kept[: plan.num_seqs].copy_(kept)
        self._bucket(plan).graphs[1].replay()

    def _layout(self, batch: int, width: int) -> Layout:
        narrow = (np.int32, (batch,))
        table = (np.int32, (batch, width))
        return Layout.of((np.int64, (batch, self._rows)), (np.int64, (batch,)), narrow, narrow, narrow, table)

    def _padding(self, batch: int) -> tuple[np.ndarray, ...]:
        none, spare = np.zeros(0, np.int32), np.full(batch, self._around.sampler.spare_row, np.int64)
        token_ids = np.arange(batch * self._rows, dtype=np.int64).reshape(batch, self._rows)
        return token_ids, spare, none, none, none, np.zeros((batch, 0), np.int32)

    def _parts(self, inputs: Sequence[Tensor]) -> tuple[Callable[[], None], ...]:
        given = Inputs(*inputs)
        model, views = self._around.model, self._around.views
        if not isinstance(model, VerifyingModel):
            raise RuntimeError(f"{type(model).__name__} verifies no drafts")
        step: StepBatch | None = None

        def verify() -> None:
            nonlocal step
            step = self._verify(given)

        def commit() -> None:
            assert step is not None
            model.commit(step, views, self._kept[: given.slots.shape[0]])

        return verify, commit

    def _verify(self, inputs: Inputs) -> StepBatch:
        around, (batch, width) = self._around, inputs.token_ids.shape
        real = self._places < inputs.new_lens.unsqueeze(1)
        flat = real.flatten()
        context = torch.where(real, inputs.context_lens.unsqueeze(1) + self._places, 0).flatten()
        tables = inputs.page_table.index_select(0, self._owners[: batch * width])
        # As if each row were a sequence of its own that decodes.
        _, kv_rows, _, row_lens = around.step_metadata(
            context, torch.ones_like(context), tables, around.page_tokens, batch * width
        )
        kv_rows, row_lens = torch.where(flat, kv_rows, -1), torch.where(flat, row_lens, 0)
        first = with_late_tokens(inputs.token_ids[:, :1], around.sampler.last_tokens(inputs.rows).unsqueeze(1))
        token_ids = torch.cat((first, inputs.token_ids[:, 1:]), 1)
        every = self._every_row[: batch * width]
        verify = VerifyBatch(
            inputs.slots, inputs.page_table, self._bounds[: batch + 1], inputs.context_lens, tables, row_lens, width
        )
        step = StepBatch(token_ids.flatten(), kv_rows, every, None, None, verify)
        logits = self._logits_of(around.model.forward(step, around.views))
        tokens, accepted = around.sampler.pick_drafts(logits.unflatten(0, (batch, width)), token_ids, real, inputs.rows)
        self._tokens[: batch * width].copy_(tokens.flatten())
        self._accepted[:batch].copy_(accepted)
        self._kept[:batch].copy_(accepted + 1)
        return step
