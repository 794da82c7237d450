"""Which drafts are kept: those that would have been sampled without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.interface import TokenLogprob
from k3hal.engine.staging import Staging
from k3hal.engine.step_plan import StepPlan, StepResult


class RowSampler(Protocol):
    """What it takes of a sampler; it knows each row's parameters and counts what it sampled for a row."""

    def sample(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[int], list[TokenLogprob | None] | None]: ...


def sample_drafts(plan: StepPlan, logits: Tensor, sampler: RowSampler) -> StepResult:
    """Sample every sequence of the plan, and those that verify once more after each draft that was what they sampled.

    `logits` fp32 [R, V] are those of `StepBatch.logit_rows`. A request's tokens are those it would get without drafts,
    whatever its sampling parameters: each is drawn with the logits and the random number of its own position.
    """
    begins, drafts = _spans(plan)
    tokens: list[list[int]] = [[] for _ in begins]
    logprobs: list[list[TokenLogprob | None]] = [[] for _ in begins]
    any_logprobs, going, depth = False, np.arange(len(begins)), 0
    while going.size:
        rows = torch.from_numpy(begins[going] + depth).to(logits.device)
        seqs = plan.sampled[going]
        sampled, asked = sampler.sample(logits[rows], plan.rows[seqs], plan.positions[going] + depth)
        any_logprobs = any_logprobs or asked is not None
        for place, i in enumerate(going.tolist()):
            tokens[i].append(sampled[place])
            logprobs[i].append(asked[place] if asked is not None else None)
        more = [i for i in going.tolist() if depth < len(drafts[i]) and drafts[i][depth] == tokens[i][-1]]
        going = np.array(more, np.int64)
        depth += 1
    verified = {int(seq): i for i, seq in enumerate(plan.sampled.tolist())}
    return StepResult(
        plan.epoch,
        [token for group in tokens for token in group],
        [one for group in logprobs for one in group] if any_logprobs else None,
        [len(tokens[verified[seq]]) - 1 for seq in range(plan.verifies.start, plan.verifies.stop)],
    )


def _spans(plan: StepPlan) -> tuple[np.ndarray, list[list[int]]]:
    """The first logit row of each sampled sequence, int64 [S], and the drafts that follow its token."""
    ends = np.cumsum(plan.new_lens)
    begins, drafts, row = [], [], 0
    for seq in plan.sampled.tolist():
        count = int(plan.new_lens[seq]) if plan.verifies.start <= seq < plan.verifies.stop else 1
        begins.append(row)
        drafts.append(plan.token_ids[ends[seq] - count + 1 : ends[seq]].tolist())
        row += count
    return np.array(begins, np.int64), drafts


class Picked(Protocol):
    """`tokens` int64 [N, Q] and `accepted` int64 [N] as of `Sampler.pick_drafts`."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def accepted(self) -> Tensor: ...


class VerifyDraw:
    """The likeliest tokens of a step that verified drafts, on their way from the device to the host."""

    def __init__(self, plan: StepPlan, picked: Picked, staging: Staging) -> None:
        self._plan = plan
        self._coming = staging.fetch(picked.tokens, picked.accepted)

    def answer(self, result: StepResult) -> StepResult:
        """Wait for them, and put them into a step's answer."""
        tokens, accepted = self._coming.lists()
        token_ids = [token for i in self._plan.sampled.tolist() for token in tokens[i][: accepted[i] + 1]]
        return replace(result, token_ids=token_ids, accepted=accepted[self._plan.verifies])


def verified_rows(plan: StepPlan, width: int) -> np.ndarray:
    """Where the rows of `StepBatch.logit_rows` are, int64 [R], when every sequence has `width` rows."""
    sampled = plan.sampled.tolist()
    return np.concatenate([seq * width + np.arange(int(plan.new_lens[seq])) for seq in sampled])
