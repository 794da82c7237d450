"""What the scheduler decides for one step: pure data that a runner executes to the letter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.constraint import Constraint, ConstraintError
from k3hal.engine.interface import TokenLogprob
from k3hal.engine.sampling import Sampling
from k3hal.engine.tier.interface import TransferDone, Transfers

NOT_YET = -1
"""Stands for a token that a step under way samples."""

BEFORE_ALL = -(1 << 31)
"""An epoch before that of every step: the scheduler's begin at 0, those that try the engine out lie between."""


@dataclass(frozen=True, slots=True)
class RowBinding:
    """A row's new sequence, before its first token is computed. `token_ids` int64: prompt, then what was generated.

    A `constraint` has to be brought past what was generated.
    """

    row: int
    sampling: Sampling
    token_ids: np.ndarray
    num_prompt: int
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over `N` sequences: `num_decodes` with one token each, then `num_verifies` whose token is followed by
    drafts, then prompts.

    `epoch` grows with every step, so that a runner notices a plan that comes late or twice. `copies` run before the
    forward pass, `bindings` before sampling, and of `transfers` the stores begin before the copies, the loads after
    them. A step may have nothing but these. `rows`, `slots`, `context_lens` (tokens cached before), `new_lens` int32
    [N]; `page_table` int32 [N, pages]; `token_ids` int64 [sum of new_lens] in the order of the sequences. The token of
    a decoding sequence is `NOT_YET` when a step before, still under way, samples it: it is what that row sampled last.
    `sampled` int64 [S] are the sequences whose last token's logits are sampled, all that verify among them, and
    `positions` int64 [S] the index of that output within its request.

    A sequence that verifies is sampled after its token and then after each draft, as long as the draft is what was
    sampled. The KV of all its new tokens is written; its state becomes that after its token and the accepted drafts.
    """

    epoch: int
    num_decodes: int
    rows: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray
    new_lens: np.ndarray
    page_table: np.ndarray
    token_ids: np.ndarray
    sampled: np.ndarray
    positions: np.ndarray
    num_verifies: int = 0
    bindings: tuple[RowBinding, ...] = ()
    copies: PageCopies = field(default_factory=PageCopies)
    transfers: Transfers = field(default_factory=Transfers)

    @property
    def num_seqs(self) -> int:
        return self.rows.size

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size

    @property
    def verifies(self) -> slice:
        """The sequences that verify drafts."""
        return slice(self.num_decodes, self.num_decodes + self.num_verifies)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, in the order of `StepPlan.sampled`: one token each, and one more for each accepted draft.

    `token_ids` holds -1 where no token could be sampled: `failures` says why for that row, or the model's logits were
    not finite. `logprobs` is None when no sequence asked for any.
    `accepted` counts the drafts taken, one number for each of the sequences that verify, in the plan's order.
    `transferred` are the movements, of steps that have begun, that have ended.
    """

    epoch: int
    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    accepted: list[int] = field(default_factory=list)
    failures: Mapping[int, ConstraintError] = field(default_factory=dict)
    transferred: tuple[TransferDone, ...] = ()
