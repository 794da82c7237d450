"""From logits to tokens, for all rows of a step at once; a feature costs nothing in steps where no row asks for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.constrained_rows import ConstrainedRows
from k3hal.engine.constraint import ConstraintError
from k3hal.engine.draws import Draw, Sampled, logprobs_asked
from k3hal.engine.penalties import Penalties
from k3hal.engine.sampling import Sampling
from k3hal.engine.staging import Staging
from k3hal.engine.step_plan import RowBinding
from k3hal.engine.uniforms import uniforms

_NO_LOGPROBS = -1


class Sampler:
    """Sampling parameters of every row and the arithmetic over them.

    Order: logit bias, penalties, banned ids, masks of constraints, then the operator `sample` (temperature, top-k,
    top-p, min-p). Random numbers are a function of (seed, output position), so a request's tokens depend neither on its
    neighbours nor on preemption. Reported log-probabilities are those of the untouched logits.

    `launch` waits for nothing but what constraints need: the tokens before. `spare_row` is nobody's.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        sample: Callable[..., Any],
        staging: Staging | None = None,
    ) -> None:
        self._staging = staging or Staging(device)
        self._sample = sample
        self._penalties = Penalties(vocab_size, self._staging)
        self._constrained = ConstrainedRows(vocab_size, self._staging)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int32)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seed = np.zeros(max_rows, np.uint64)
        self._num_logprobs = np.full(max_rows, _NO_LOGPROBS, np.int32)
        self._special = np.zeros(max_rows, np.bool_)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._banned: dict[int, tuple[int, Tensor]] = {}
        self._last = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._open: deque[Draw] = deque()
        self.spare_row = max_rows

    def take_failures(self) -> dict[int, ConstraintError]:
        """Why no token comes of a row, of all rows whose constraints failed since this was last asked."""
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
        self._special[row] = not _plain(sampling) or binding.constraint is not None
        if sampling.penalised:
            self._penalties.bind(row, sampling, binding.token_ids, binding.num_prompt)
        if sampling.logit_bias:
            biased = np.array(list(sampling.logit_bias), np.int64)
            ids, values = self._staging.upload(biased, np.array(list(sampling.logit_bias.values()), np.float32))
            self._bias[row] = ids, values
        if binding.constraint is not None:
            generated = binding.token_ids[binding.num_prompt :]
            self._constrained.bind(row, binding.constraint, generated, sampling.min_tokens, sampling.banned_ids)
        elif sampling.banned_ids:
            self._banned[row] = sampling.min_tokens, self._staging.upload(np.array(sampling.banned_ids, np.int64))[0]

    def sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """As `launch`, and wait for it."""
        return self.launch(logits, rows, positions).result()

    def launch(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Draw:
        """Begin to sample from logits fp32 [S, V], which this may overwrite.

        `rows` int [S] says whose they are, `positions` int64 [S] which output this is. A row whose logits are not
        finite at their maximum gives -1.
        """
        row_list: list[int] = rows.tolist()
        asked = logprobs_asked(logits, rows, self._num_logprobs, self._staging)
        penalised = self._penalties.select(row_list)
        self._bias_logits(logits, row_list)
        if penalised:
            self._penalties.apply(logits, penalised)
        self._ban(logits, row_list, positions)
        if self._constrained.any(row_list):
            self.settle()
            self._constrained.apply(logits, row_list, positions)
        best, tokens = logits.max(-1)
        finite = torch.isfinite(best)
        random = np.flatnonzero(self._temperature[rows] > 0)
        if random.size:
            self._draw(logits, finite, tokens, rows, positions, random)
        if penalised:
            self._penalties.record(penalised, tokens)
        (index,) = self._staging.upload(rows.astype(np.int64))
        return self._begun(Draw(self._staging, self._keep(tokens, finite, index), self._collect(row_list), asked))

    def plain(self, rows: np.ndarray) -> bool:
        """Whether `pick` is all that `launch` would do for these rows."""
        return not self._special[rows].any()

    def pick(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The most likely tokens int64 [B] of logits fp32 [B, V], -1 where they are not finite.

        `rows` int64 [B] on the device say whose they are. Nothing but work on the device: it may be captured.
        """
        best, tokens = logits.max(-1)
        return self._keep(tokens, torch.isfinite(best), rows)

    def pick_drafts(self, logits: Tensor, token_ids: Tensor, real: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As `pick`, of sequences that verify drafts: the tokens int64 [B, Q] of logits fp32 [B, Q, V], and how many
        drafts int64 [B] are what was picked before them, up to the first that is not.

        `token_ids` int64 [B, Q] are a token and its drafts, those that are `real` bool [B, Q].
        """
        best, likeliest = logits.max(-1)
        tokens = torch.where(torch.isfinite(best), likeliest, -1)
        right = (token_ids[:, 1:] == tokens[:, :-1]) & real[:, 1:]
        accepted = right.int().cumprod(1).sum(1)
        self._last[rows] = likeliest.gather(1, accepted.unsqueeze(1)).squeeze(1)
        return tokens, accepted

    def picked(self, tokens: Tensor, rows: np.ndarray, picks: np.ndarray) -> Draw:
        """What `pick` gave to plain rows: `tokens` int64 [B], those at `picks` int64 [S], which belong to `rows`."""
        return self._begun(Draw(self._staging, tokens, self._collect(rows.tolist()), picks=picks))

    def last_tokens(self, rows: Tensor) -> Tensor:
        """What each of `rows` int64 [N] on the device sampled last, int64 [N]; any token where it gave -1."""
        return self._last[rows]

    def settle(self) -> None:
        """Wait for everything that was launched."""
        while self._open:
            self._open[0].result()

    def give_up(self) -> None:
        """What was launched and has not been waited for failed with its steps."""
        self._open.clear()

    def _keep(self, tokens: Tensor, finite: Tensor, rows: Tensor) -> Tensor:
        self._last[rows] = tokens
        return torch.where(finite, tokens, -1)

    def _begun(self, draw: Draw) -> Draw:
        self._open.append(draw)
        return draw

    def _collect(self, rows: list[int]) -> Callable[[Draw, list[int]], None]:
        def collected(draw: Draw, token_ids: list[int]) -> None:
            if draw in self._open:
                self._open.remove(draw)
            self._constrained.record(rows, token_ids)

        return collected

    def _bias_logits(self, logits: Tensor, rows: list[int]) -> None:
        for i, row in enumerate(rows) if self._bias else ():
            if row in self._bias:
                logits[i].index_add_(0, *self._bias[row])

    def _ban(self, logits: Tensor, rows: list[int], positions: np.ndarray) -> None:
        for i, row in enumerate(rows) if self._banned else ():
            if row in self._banned and positions[i] < self._banned[row][0]:
                logits[i].index_fill_(0, self._banned[row][1], -torch.inf)

    def _draw(
        self,
        logits: Tensor,
        finite: Tensor,
        tokens: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        random: np.ndarray,
    ) -> None:
        """Replace in `tokens` those of the rows at `random`, which do not take the most likely one."""
        # The operator takes no NaN. Looking whether there is one would wait for the device, where that takes time.
        if self._staging.asynchronous or not bool(finite.all()):
            logits.masked_fill_(~finite.unsqueeze(-1), 0.0)
        chosen = rows[random]
        index, *parameters = self._staging.upload(
            random,
            self._temperature[chosen],
            self._top_k[chosen],
            self._top_p[chosen],
            self._min_p[chosen],
            uniforms(self._seed[chosen], positions[random]),
        )
        tokens[index] = self._sample(logits if random.size == rows.size else logits[index], *parameters)


def _plain(sampling: Sampling) -> bool:
    """Whether the most likely token is taken as it is, and nothing else said of it."""
    adjusted = sampling.penalised or sampling.logit_bias or sampling.banned_ids
    return sampling.greedy and sampling.logprobs is None and not adjusted
