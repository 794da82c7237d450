"""What the scheduler decides for one step: pure data that a runner executes to the letter."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.interface import TokenLogprob
from k3hal.engine.sampling import Sampling
from k3hal.engine.tier.interface import TransferDone, Transfers


@dataclass(frozen=True, slots=True)
class RowBinding:
    """A row's new sequence, before its first token is computed. `token_ids` int64: prompt, then what was generated."""

    row: int
    sampling: Sampling
    token_ids: np.ndarray
    num_prompt: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over `N` sequences, the `num_decodes` that decode one token each first.

    `epoch` grows with every step, so that a runner notices a plan that comes late or twice. `copies` run before the
    forward pass, `bindings` before sampling, and of `transfers` the stores begin before the copies, the loads after
    them. A step may have nothing but these.  `rows`, `slots`, `context_lens` (tokens cached before), `new_lens` int32
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
    transfers: Transfers = field(default_factory=Transfers)

    @property
    def num_seqs(self) -> int:
        return self.rows.size

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, in the order of `StepPlan.sampled`.

    `token_ids` holds -1 where the model's logits were not finite. `logprobs` is None when no sequence asked for any.
    `transferred` are the movements, of this step or earlier ones, that have ended.
    """

    epoch: int
    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    transferred: tuple[TransferDone, ...] = ()
