"""Steps of a few tokens with prompts among them: graphs of what each token goes through alone, attention in between."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.runtime import CapturesParts, Graph
from k3hal.engine.graphs import Around, check_replay
from k3hal.model.batch import Attention, CacheViews, StepBatch
from k3hal.model.progress import progress_bar

logger = logging.getLogger(__name__)

TOKENS = (16, 32, 64, 96, 128, 192, 256)
"""Tokens that graphs are captured for. With more the device works longer than the host launches."""


@dataclass(frozen=True, slots=True)
class _Seamed(StepBatch):
    """A step of so many tokens and no sequences, whose attention is `seam`."""

    seam: Callable[[Attention, tuple[Tensor, ...], int], Tensor] | None = None

    def attend(self, attention: Attention, inputs: tuple[Tensor, ...], cache: CacheViews, width: int) -> Tensor:
        assert self.seam is not None
        return self.seam(attention, inputs, width)


@dataclass(frozen=True, slots=True)
class _Attended:
    """An attention between two graphs: what the one before leaves for it, and where the one behind finds its result."""

    attention: Attention
    inputs: tuple[Tensor, ...]
    out: Tensor


@dataclass(frozen=True, slots=True)
class _Pieces:
    """One graph more than attentions. The last leaves `hidden` [T, D]."""

    graphs: list[Graph]
    attended: list[_Attended]
    hidden: Tensor


class StepPieces:
    """A model's `forward` for steps of up to `most` tokens, in pieces.

    What is launched for a layer one by one is its attention alone, the rest is a replay. Rows of a graph beyond a
    step's tokens hold what earlier steps left there, and nobody looks at them.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._token_ids = torch.zeros(TOKENS[-1], dtype=torch.int64, device=around.staging.device)
        self._outs: dict[tuple[int, torch.dtype], Tensor] = {}
        self._pieces: dict[int, _Pieces] = {}
        self.replays = 0

    @property
    def most(self) -> int:
        """The most tokens of a step."""
        return TOKENS[-1] if self._pieces else 0

    @torch.inference_mode()
    def prepare(self, pool: Any) -> None:
        """Capture all graphs. Raises `BackendError` when replays do not give what the same work gave without them."""
        runtime = self._around.runtime
        assert isinstance(runtime, CapturesParts)
        pieces: dict[int, _Pieces] = {}
        with progress_bar("capturing graphs around attention", len(TOKENS), steps=True) as progress:
            for tokens in reversed(TOKENS):
                pieces[tokens] = self._capture(tokens, runtime, pool)
                if progress:
                    progress(1)
        self._pieces = pieces
        logger.info("captured graphs around attention for up to %d tokens", TOKENS[-1])

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: CacheViews) -> Tensor:
        """Hidden states [T, D] after the final norm, until the next step; advances the cache."""
        count = batch.token_ids.shape[0]
        pieces = self._pieces[TOKENS[bisect_left(TOKENS, count)]]
        self._token_ids[:count].copy_(batch.token_ids)
        for graph, between in zip(pieces.graphs, pieces.attended, strict=False):
            graph.replay()
            inputs = tuple(t[:count] for t in between.inputs)
            between.out[:count].copy_(between.attention(inputs, batch, cache))
        pieces.graphs[-1].replay()
        self.replays += 1
        return pieces.hidden[:count]

    def _capture(self, tokens: int, runtime: CapturesParts, pool: Any) -> _Pieces:
        around, token_ids = self._around, self._token_ids[:tokens]
        token_ids.copy_(torch.arange(tokens))
        expected = around.model.forward(
            self._step(token_ids, lambda _, inputs, width: self._out(inputs, width)), around.views
        )
        expected = expected.clone()
        attended: list[_Attended] = []
        hidden = [expected]

        def work(cut: Callable[[], None]) -> None:
            def seam(attention: Attention, inputs: tuple[Tensor, ...], width: int) -> Tensor:
                attended.append(_Attended(attention, inputs, self._out(inputs, width)))
                cut()
                return attended[-1].out

            hidden[0] = around.model.forward(self._step(token_ids, seam), around.views)

        graphs = runtime.capture_parts(work, pool)
        for graph in graphs:
            graph.replay()
        check_replay(hidden[0], expected, f"steps of {tokens} tokens, around attention,")
        return _Pieces(graphs, attended, hidden[0])

    def _step(self, token_ids: Tensor, seam: Callable[[Attention, tuple[Tensor, ...], int], Tensor]) -> StepBatch:
        return _Seamed(token_ids, token_ids, token_ids, None, None, None, seam)

    def _out(self, inputs: tuple[Tensor, ...], width: int) -> Tensor:
        """Where an attention's result goes. All of a width share it: the graph behind reads it before the next's."""
        like = inputs[0]
        key = width, like.dtype
        if key not in self._outs:
            self._outs[key] = torch.zeros(TOKENS[-1], width, dtype=like.dtype, device=like.device)
        return self._outs[key][: like.shape[0]]
