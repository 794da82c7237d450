"""Runs a given sequence through a live model, prompt in one step and the rest token by token, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.runner import ModelRunner
from k3hal.engine.step_plan import StepPlan

PREFILL, DECODE = "prefill", "decode"
_SLOT = 1
_FIRST_EPOCH = 1 << 40


class Driver:
    """Owns an idle runner: one sequence, in the first slot and pages of its arena, from the start in every run."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._epoch = _FIRST_EPOCH

    def run(self, token_ids: Sequence[int], decodes: int, stage: Callable[[str], None]) -> Tensor:
        """fp32 logits [T, V] on the CPU of every token, the last `decodes` of them fed one at a time.

        `stage` is told of each step's kind before it runs.
        """
        split = len(token_ids) - decodes
        stage(PREFILL)
        parts = [self._step(token_ids[:split], 0)]
        for position in range(split, len(token_ids)):
            stage(DECODE)
            parts.append(self._step(token_ids[position : position + 1], position))
        return torch.cat(parts)

    def _step(self, token_ids: Sequence[int], context: int) -> Tensor:
        arena, none = self._runner.arena, np.zeros(0, np.int64)
        pages = -(-(context + len(token_ids)) // arena.layout.page_tokens)
        first = (_SLOT + 1) * arena.layout.pages_per_slot
        self._epoch += 1
        plan = StepPlan(
            epoch=self._epoch,
            num_decodes=int(context > 0),
            rows=np.zeros(1, np.int32),
            slots=np.full(1, _SLOT, np.int32),
            context_lens=np.full(1, context, np.int32),
            new_lens=np.full(1, len(token_ids), np.int32),
            page_table=np.arange(first, first + pages, dtype=np.int32)[None],
            token_ids=np.asarray(token_ids, np.int64),
            sampled=none,
            positions=none,
        )
        return self._runner.score(plan).to("cpu", torch.float32)
