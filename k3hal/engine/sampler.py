"""From logits to tokens, for all rows of a step at once; a feature costs nothing in steps where no row asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.constrained_rows import ConstrainedRows
from k3hal.engine.constraint import ConstraintError
from k3hal.engine.interface import TokenLogprob
from k3hal.engine.penalties import Penalties
from k3hal.engine.step_plan import RowBinding
from k3hal.engine.uniforms import uniforms

_NO_LOGPROBS = -1


class Sampler:
    """Sampling parameters of every row and the arithmetic over them.

    Order: logit bias, penalties, banned ids, masks of constraints, then the operator `sample` (temperature, top-k,
    top-p, min-p). Random numbers are a function of (seed, output position), so a request's tokens depend neither on its
    neighbours nor on preemption. Reported log-probabilities are those of the untouched logits.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, sample: Callable[..., Any]) -> None:
        self._device = device
        self._sample = sample
        self._penalties = Penalties(vocab_size, device)
        self._constrained = ConstrainedRows(vocab_size, device)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int32)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seed = np.zeros(max_rows, np.uint64)
        self._num_logprobs = np.full(max_rows, _NO_LOGPROBS, np.int32)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._banned: dict[int, tuple[int, Tensor]] = {}
        self._last = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def take_failures(self) -> dict[int, ConstraintError]:
        """Why no token came of a row, of all rows whose constraints failed since this was last asked."""
        return self._constrained.take_failures()

    def bind(self, binding: RowBinding) -> None:
        """Give a row to a sequence; everything of its previous one is dropped."""
        row, sampling = binding.row, binding.sampling
        self._penalties.forget(row)
        self._constrained.forget(row)
        self._bias.pop(row, None)
        self._banned.pop(row, None)
        self._temperature[row] = sampling.temperature
        self._top_k[row], self._top_p[row], self._min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p
        self._seed[row] = sampling.seed
        self._num_logprobs[row] = _NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        if sampling.penalised:
            self._penalties.bind(row, sampling, binding.token_ids, binding.num_prompt)
        if sampling.logit_bias:
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
            self._bias[row] = torch.tensor(list(sampling.logit_bias)).to(self._device), values.to(self._device)
        if binding.constraint is not None:
            generated = binding.token_ids[binding.num_prompt :]
            self._constrained.bind(row, binding.constraint, generated, sampling.min_tokens, sampling.banned_ids)
        elif sampling.banned_ids:
            self._banned[row] = sampling.min_tokens, torch.tensor(sampling.banned_ids).to(self._device)

    def sample(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[int], list[TokenLogprob | None] | None]:
        """Tokens and log-probabilities of logits fp32 [S, V], which this may overwrite.

        `rows` int [S] says whose they are, `positions` int64 [S] which output this is. A row whose logits are not
        finite at their maximum gives -1.
        """
        row_list: list[int] = rows.tolist()
        asked = np.flatnonzero(self._num_logprobs[rows] >= 0)
        raw = torch.log_softmax(logits[torch.from_numpy(asked).to(self._device)], -1) if asked.size else None
        self._adjust(logits, row_list, positions)
        best, tokens = logits.max(-1)
        finite = [math.isfinite(value) for value in best.tolist()]
        random = np.flatnonzero(self._temperature[rows] > 0)
        if random.size:
            if not all(finite):
                logits = torch.where(torch.isfinite(best).unsqueeze(-1), logits, 0.0)
            self._draw(logits, tokens, rows, positions, random)
        self._penalties.record(row_list, tokens)
        self._last[torch.from_numpy(rows).to(self._device)] = tokens
        token_ids = [token if ok else -1 for token, ok in zip(tokens.tolist(), finite, strict=True)]
        self._constrained.record(row_list, token_ids)
        return token_ids, None if raw is None else self._logprobs(raw, asked, rows, token_ids)

    def last_tokens(self, rows: np.ndarray) -> Tensor:
        """What each of `rows` int [N] sampled last, int64 [N] on the device; any token where it gave -1."""
        return self._last[torch.from_numpy(rows).to(self._device)]

    def _adjust(self, logits: Tensor, rows: list[int], positions: np.ndarray) -> None:
        biased = [(i, *self._bias[row]) for i, row in enumerate(rows) if row in self._bias] if self._bias else []
        for i, ids, values in biased:
            logits[i, ids] += values
        self._penalties.apply(logits, rows)
        for i, row in enumerate(rows) if self._banned else ():
            if row in self._banned and positions[i] < self._banned[row][0]:
                logits[i, self._banned[row][1]] = -torch.inf
        self._constrained.apply(logits, rows, positions)

    def _draw(
        self, logits: Tensor, tokens: Tensor, rows: np.ndarray, positions: np.ndarray, random: np.ndarray
    ) -> None:
        """Replace in `tokens` those of the rows at `random`, which do not take the most likely one."""
        chosen = rows[random]
        index = torch.from_numpy(random).to(self._device)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self._device)

        tokens[index] = self._sample(
            logits if random.size == rows.size else logits[index],
            put(self._temperature[chosen]),
            put(self._top_k[chosen]),
            put(self._top_p[chosen]),
            put(self._min_p[chosen]),
            put(uniforms(self._seed[chosen], positions[random])),
        )

    def _logprobs(
        self, raw: Tensor, asked: np.ndarray, rows: np.ndarray, token_ids: list[int]
    ) -> list[TokenLogprob | None]:
        """Log-probabilities from `raw` [A, V], the log-softmax of the rows `asked`; None for the others."""
        counts: list[int] = self._num_logprobs[rows[asked]].tolist()
        chosen = [max(token_ids[i], 0) for i in asked.tolist()]
        values = raw[torch.arange(len(chosen)), torch.tensor(chosen)].tolist()
        top_values, top_ids = raw.topk(min(max(counts), raw.shape[-1]), -1)
        result: list[TokenLogprob | None] = [None] * len(token_ids)
        for place, token, value, count, ids, tops in zip(
            asked.tolist(), chosen, values, counts, top_ids.tolist(), top_values.tolist(), strict=True
        ):
            result[place] = TokenLogprob(token, value, tuple(zip(ids[:count], tops[:count], strict=True)))
        return result
