"""What a step sampled, on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.interface import TokenLogprob
from k3hal.engine.staging import Fetch, Fetched, Staging
from k3hal.engine.step_plan import StepResult

Sampled = tuple[list[int], list[TokenLogprob | None] | None]


class Drawn(Protocol):
    """What a step sampled, on its way."""

    def answer(self, result: StepResult) -> StepResult:
        """Wait for it, and return the step's answer with it."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose log-probabilities are reported: the places among the sampled rows, and how many alternatives of each.

    `raw` fp32 [A, V] are their logarithms of probability.
    """

    places: np.ndarray
    counts: list[int]
    raw: Tensor

    def report(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each asked row the value of its token, from `tokens` int64 [S] (-1 counts as 0), and the best ones."""
        chosen = tokens[places].clamp_min(0).unsqueeze(-1)
        top_values, top_ids = self.raw.topk(min(max(self.counts), self.raw.shape[-1]), -1)
        return self.raw.gather(-1, chosen).squeeze(-1), top_values, top_ids

    def entries(
        self, token_ids: list[int], values: list[float], top_values: list[list[float]], top_ids: list[list[int]]
    ) -> list[TokenLogprob | None]:
        """One for each sampled row, None where none was asked for."""
        result: list[TokenLogprob | None] = [None] * len(token_ids)
        for place, value, count, ids, tops in zip(
            self.places.tolist(), values, self.counts, top_ids, top_values, strict=True
        ):
            best = tuple(zip(ids[:count], tops[:count], strict=True))
            result[place] = TokenLogprob(max(token_ids[place], 0), value, best)
        return result


class Draw:
    """Tokens int64 [S] of a step, -1 where none could be sampled; `collected` is told of them when they are there.

    `picks` takes those out that were sampled, where the tensor has more.
    """

    def __init__(
        self,
        staging: Staging,
        tokens: Tensor,
        collected: Callable[[Draw, list[int]], None],
        asked: Asked | None = None,
        picks: np.ndarray | None = None,
    ) -> None:
        self._picks, self._asked, self._collected = picks, asked, collected
        report: tuple[Tensor, ...] = ()
        if asked is not None:
            (places,) = staging.upload(asked.places)
            report = asked.report(tokens, places)
        self._coming: Fetch | Fetched | None = staging.fetch(tokens, *report)
        self._sampled: Sampled | None = None

    def result(self) -> Sampled:
        """Wait for the tokens and log-probabilities; the same at every call."""
        if self._sampled is None:
            if self._coming is None:
                raise RuntimeError("the device failed before it had sampled")
            coming, self._coming = self._coming, None
            token_ids, *report = coming.lists()
            if self._picks is not None:
                token_ids = [token_ids[i] for i in self._picks.tolist()]
            self._sampled = token_ids, self._asked.entries(token_ids, *report) if self._asked else None
            self._collected(self, token_ids)
        return self._sampled

    def answer(self, result: StepResult) -> StepResult:
        """As `result`, put into a step's answer."""
        token_ids, logprobs = self.result()
        return replace(result, token_ids=token_ids, logprobs=logprobs)


def logprobs_asked(logits: Tensor, rows: np.ndarray, counts: np.ndarray, staging: Staging) -> Asked | None:
    """Keep what is reported of the untouched logits fp32 [S, V]; `counts` int32 by row, negative where not asked."""
    places = np.flatnonzero(counts[rows] >= 0)
    if not places.size:
        return None
    (index,) = staging.upload(places)
    return Asked(places, counts[rows[places]].tolist(), torch.log_softmax(logits[index], -1))
