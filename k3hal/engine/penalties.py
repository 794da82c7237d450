"""Presence, frequency and repetition penalties, kept only for the rows that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.sampling import Sampling
from k3hal.engine.staging import Staging

_START = 4


@dataclass(frozen=True, slots=True)
class Penalised:
    """The rows of a step that are penalised: `index` int64 [P] their places, `entries` int64 [P] in the tables."""

    index: Tensor
    entries: Tensor


class Penalties:
    """Token counts of the penalised rows and what they do to logits.

    `counts` int32 [entries, V] holds how often each token was generated, `prompt` bool [entries, V] whether it stands
    in the prompt; entries are few and grow on demand.
    """

    def __init__(self, vocab_size: int, staging: Staging) -> None:
        self._staging, device = staging, staging.device
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._factors = torch.ones(0, 3, dtype=torch.float32, device=device)
        self._entry: dict[int, int] = {}
        self._free: list[int] = []

    def forget(self, row: int) -> None:
        if (entry := self._entry.pop(row, None)) is not None:
            self._free.append(entry)

    def bind(self, row: int, sampling: Sampling, token_ids: np.ndarray, num_prompt: int) -> None:
        """Count the tokens of a row's sequence afresh."""
        if not self._free:
            self._grow()
        entry = self._entry[row] = self._free.pop()
        factors = [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty]
        ids, ones, values = self._staging.upload(
            token_ids, np.ones(token_ids.size - num_prompt, np.int32), np.array(factors, np.float32)
        )
        self._counts[entry].zero_().scatter_add_(0, ids[num_prompt:], ones)
        self._prompt[entry].zero_().index_fill_(0, ids[:num_prompt], True)
        self._factors[entry].copy_(values)

    def select(self, rows: list[int]) -> Penalised | None:
        """Those of `rows` that ask for penalties."""
        index = [i for i, row in enumerate(rows) if row in self._entry] if self._entry else []
        if not index:
            return None
        entries = np.array([self._entry[rows[i]] for i in index], np.int64)
        return Penalised(*self._staging.upload(np.array(index, np.int64), entries))

    def apply(self, logits: Tensor, penalised: Penalised) -> None:
        """Penalise in place those of the logits fp32 [S, V].

        A token seen anywhere has a positive logit divided, a negative one multiplied by the repetition penalty; one
        generated c times then loses presence + c * frequency.
        """
        index, entries = penalised.index, penalised.entries
        counts = self._counts[entries]
        presence, frequency, repetition = self._factors[entries].unsqueeze(-1).unbind(1)
        x = logits[index]
        seen = self._prompt[entries] | (counts > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[index] = x - presence * (counts > 0) - frequency * counts

    def record(self, penalised: Penalised, token_ids: Tensor) -> None:
        """Count the tokens just sampled, int64 [S]."""
        self._counts[penalised.entries, token_ids[penalised.index]] += 1

    def _grow(self) -> None:
        old = self._counts.shape[0]
        more = max(old, _START)
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._counts.shape[1])))
        self._prompt = torch.cat((self._prompt, self._prompt.new_zeros(more, self._prompt.shape[1])))
        self._factors = torch.cat((self._factors, self._factors.new_ones(more, 3)))
        self._free.extend(range(old + more - 1, old - 1, -1))
