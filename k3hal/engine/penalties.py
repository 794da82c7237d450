"""Presence, frequency and repetition penalties, kept only for the rows that ask for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.sampling import Sampling

_START = 4


class Penalties:
    """Token counts of the penalised rows and what they do to logits.

    `counts` int32 [entries, V] holds how often each token was generated, `prompt` bool [entries, V] whether it stands
    in the prompt; entries are few and grow on demand.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
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
        device = self._counts.device
        ids = torch.from_numpy(token_ids).to(device)
        generated = torch.bincount(ids[num_prompt:], minlength=self._counts.shape[1])
        self._counts[entry] = generated.to(torch.int32)
        self._prompt[entry] = False
        self._prompt[entry, ids[:num_prompt]] = True
        factors = [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty]
        self._factors[entry] = torch.tensor(factors, device=device)

    def apply(self, logits: Tensor, rows: list[int]) -> None:
        """Penalise in place the logits fp32 [S, V] of the rows among `rows` that ask for it.

        A token seen anywhere has a positive logit divided, a negative one multiplied by the repetition penalty; one
        generated c times then loses presence + c * frequency.
        """
        index, entries = self._select(rows)
        if not index:
            return
        counts = self._counts[entries]
        presence, frequency, repetition = self._factors[entries].unsqueeze(-1).unbind(1)
        x = logits[index]
        seen = self._prompt[entries] | (counts > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[index] = x - presence * (counts > 0) - frequency * counts

    def record(self, rows: list[int], token_ids: Tensor) -> None:
        """Count the tokens just sampled, int64 [S]."""
        index, entries = self._select(rows)
        if index:
            self._counts[entries, token_ids[index]] += 1

    def _select(self, rows: list[int]) -> tuple[list[int], list[int]]:
        if not self._entry:
            return [], []
        index = [i for i, row in enumerate(rows) if row in self._entry]
        return index, [self._entry[rows[i]] for i in index]

    def _grow(self) -> None:
        old = self._counts.shape[0]
        more = max(old, _START)
        self._counts = torch.cat((self._counts, self._counts.new_zeros(more, self._counts.shape[1])))
        self._prompt = torch.cat((self._prompt, self._prompt.new_zeros(more, self._prompt.shape[1])))
        self._factors = torch.cat((self._factors, self._factors.new_ones(more, 3)))
        self._free.extend(range(old + more - 1, old - 1, -1))
