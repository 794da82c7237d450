"""What the scheduler decides for one step: pure data that a runner executes to the letter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.constraint import Constraint
from k3hal.engine.interface import TokenLogprob
from k3hal.engine.sampling import Sampling


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
    """One step over `N` sequences, the `num_decodes` that decode one token each first.

    `epoch` grows with every step, so that a runner notices a plan that comes late or twice. `copies` run before the
    forward pass, `bindings` before sampling. `rows`, `slots`, `context_lens` (tokens cached before), `new_lens` int32
    [N]; `page_table` int32 [N, pages]; `token_ids` int64 [sum of new_lens] in the order of the sequences. `sampled`
    int64 [S] are the sequences whose last token's logits are sampled, and `positions` int64 [S] the index of that
    output within its request.
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
    bindings: tuple[RowBinding, ...] = ()
    copies: PageCopies = field(default_factory=PageCopies)

    @property
    def num_seqs(self) -> int:
        return self.rows.size

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, in the order of `StepPlan.sampled`.

    `token_ids` holds -1 where no token could be sampled: `failures` says why at that place, or the model's logits were
    not finite. `logprobs` is None when no sequence asked for any.
    """

    epoch: int
    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
