"""Runs a given sequence through a live model, prompt in one step and the rest token by token, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.runner import ModelRunner
from k3hal.engine.step_plan import StepPlan

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
_FIRST_EPOCH = 1 << 40
_FIRST_RUN = 1
"""The first run of the arena is null."""


class Driver:
    """Owns an idle runner: one sequence, in the first slot and pages of its arena, from the start in every run."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._epoch = _FIRST_EPOCH

    def run(
        self,
        token_ids: Sequence[int],
        decodes: int,
        stage: Callable[[str], None],
        *,
        moved: bool = False,
        drafted: int = 0,
    ) -> Tensor:
        """fp32 logits [T, V] on the CPU of every token, the last `decodes` of them fed one at a time.

        `stage` is told of each step's kind before it runs. With `moved` the sequence's state and latents are copied
        to other pages before the first decode, and it goes on there. `ValueError` if the arena has no room for both.
        With `drafted`, fewer than `decodes` and for a model that verifies drafts, the second step feeds a token with
        so many right drafts behind it and a wrong one.
        """
        layout, split = self._runner.arena.layout, len(token_ids) - decodes
        pages = layout.pages_for(len(token_ids))
        size = layout.pages_per_slot + -(-pages // layout.pages_per_slot) * layout.pages_per_slot
        home = np.arange(size) + _FIRST_RUN * layout.pages_per_slot
        if moved and home[-1] + size >= self._runner.arena.num_pages:
            raise ValueError(f"{self._runner.arena.num_pages} pages do not hold a sequence of {pages} twice")
        stage(PREFILL)
        parts = [self._step(token_ids[:split], 0, home)]
        copies = PageCopies(home, home + size) if moved else PageCopies()
        home = home + size if moved else home
        if drafted:
            stage(VERIFY)
            wrong = token_ids[split + drafted] - 1 if token_ids[split + drafted] else 1
            tokens = [*token_ids[split : split + 1 + drafted], wrong]
            parts.append(self._step(tokens, split, home, copies, accepted=[drafted])[:-1])
            copies, split = PageCopies(), split + 1 + drafted
        for position in range(split, len(token_ids)):
            stage(DECODE)
            parts.append(self._step(token_ids[position : position + 1], position, home, copies))
            copies = PageCopies()
        return torch.cat(parts)

    def _step(
        self,
        token_ids: Sequence[int],
        context: int,
        home: np.ndarray,
        copies: PageCopies | None = None,
        accepted: Sequence[int] = (),
    ) -> Tensor:
        """Of the sequence whose slot's pages and then latents' pages are `home`; its drafts are `accepted`, if any."""
        layout, none = self._runner.arena.layout, np.zeros(0, np.int64)
        first = int(home[layout.pages_per_slot])
        self._epoch += 1
        plan = StepPlan(
            epoch=self._epoch,
            num_decodes=int(context > 0 and not accepted),
            num_verifies=len(accepted),
            rows=np.zeros(1, np.int32),
            slots=np.full(1, home[0] // layout.pages_per_slot, np.int32),
            context_lens=np.full(1, context, np.int32),
            new_lens=np.full(1, len(token_ids), np.int32),
            page_table=np.arange(first, first + layout.pages_for(context + len(token_ids)), dtype=np.int32)[None],
            token_ids=np.asarray(token_ids, np.int64),
            sampled=none,
            positions=none,
            copies=copies or PageCopies(),
        )
        return self._runner.score(plan, accepted).to("cpu", torch.float32)
