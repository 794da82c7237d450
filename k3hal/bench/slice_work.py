"""Steps of a slice without requests: random residual streams, random latents and states, real page tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.engine.cache.arena import CacheArena
from k3hal.model.batch import DecodeBatch, PrefillBatch, StepBatch
from k3hal.model.k3 import K3Model, Layer
from k3hal.model.moe import MoE
from k3hal.model.residual import Stream

ENDS = "ends"
"""The kind of what stands around the layers: embedding, final norm and output head."""
_LATENT_STD, _STATE_STD = 1.0, 0.1
_FILL_PAGES = 256


@dataclass(frozen=True, slots=True)
class Space:
    """Cache memory divided by hand: slots 1 to `slots`, and `pages` behind them, on the device."""

    arena: CacheArena
    slots: int
    pages: Tensor

    @classmethod
    def of(cls, arena: CacheArena, slots: int) -> Space:
        """At most `slots` slots, and pages for the rest; all filled with values as a running model leaves them."""
        per = arena.layout.pages_per_slot
        slots = min(slots, arena.num_slots - 1 - (arena.layout.kv_layers > 0))  # the null run, and one for pages
        first = (slots + 1) * per
        space = cls(arena, slots, torch.arange(first, arena.num_pages, dtype=torch.int32, device=arena.pages.device))
        space._fill(first)
        return space

    def holds(self, batch: int, context: int) -> bool:
        """Whether so many sequences of so many tokens have pages and slots of their own."""
        return batch <= self.slots and batch * self.arena.layout.pages_for(context) <= len(self.pages)

    def table(self, batch: int, context: int, generator: torch.Generator) -> Tensor:
        """A page table int32 [batch, pages] that names each page once at most."""
        per = self.arena.layout.pages_for(context)
        order = torch.randperm(len(self.pages), generator=generator, device=self.pages.device)
        return self.pages[order[: batch * per]].view(batch, per)

    def _fill(self, first: int) -> None:
        views = self.arena.views
        for conv, state in zip(views.conv, views.state, strict=True):
            conv[1 : self.slots + 1].normal_()
            state[1 : self.slots + 1].normal_(0.0, _STATE_STD)
        for kv in views.kv:
            block = torch.randn(_FILL_PAGES, *kv.shape[1:], device=kv.device).mul_(_LATENT_STD).to(kv.dtype)
            for begin in range(first, kv.shape[0], _FILL_PAGES):
                target = kv[begin : begin + _FILL_PAGES]
                target.copy_(block[: len(target)])


class Work:
    """Steps over `batches`, each with a residual stream of its own, in whole and layer by layer."""

    def __init__(self, model: K3Model, space: Space, batches: Sequence[StepBatch]) -> None:
        self._model, self._views, self._batches = model, space.arena.views, batches
        rows, width = batches[0].token_ids.shape[0], model.embedding.shape[1]
        like = {"dtype": model.embedding.dtype, "device": model.embedding.device}
        self._prefixes = [torch.randn(rows, width, **like) for _ in batches]
        self._deltas = [torch.randn(rows, width, **like) for _ in batches]
        # One set of blocks is enough: who stores one stores the prefix.
        self._blocks = torch.randn(model.num_blocks, rows, width, **like) if model.num_blocks else None

    def kinds(self) -> dict[str, list[Callable[[], Any]]]:
        """Calls of each kind of layer, over all layers and batches in turn, then of what is around them."""
        out: dict[str, list[Callable[[], Any]]] = {}
        for kind, layers in kinds_of(self._model).items():
            count = max(len(layers), len(self._batches))
            out[kind] = [self._layer(layers[i % len(layers)], i % len(self._batches)) for i in range(count)]
        out[ENDS] = [self._ends(i) for i in range(len(self._batches))]
        return out

    def steps(self) -> list[Callable[[], Any]]:
        """Calls of the whole step up to its logits."""
        return [self._step(batch) for batch in self._batches]

    def _step(self, batch: StepBatch) -> Callable[[], Tensor]:
        return lambda: self._model.logits(self._model.forward(batch, self._views)[batch.logit_rows])

    def _layer(self, layer: Layer, index: int) -> Callable[[], Tensor]:
        # The prefix grows with every repetition; all that reads it normalises it.
        stream = Stream(self._prefixes[index], self._blocks)
        return lambda: layer(stream, self._deltas[index], self._batches[index], self._views)

    def _ends(self, index: int) -> Callable[[], Tensor]:
        model, batch, stream = self._model, self._batches[index], Stream(self._prefixes[index], self._blocks)

        def work() -> Tensor:
            model.embed(batch.token_ids, model.embedding)
            return model.logits(model.final(stream, self._deltas[index])[batch.logit_rows])

        return work


def kinds_of(model: K3Model) -> dict[str, list[Layer]]:
    """A model's layers by kind: `kda` or `mla`, with experts unless the name says `dense`."""
    out: dict[str, list[Layer]] = {}
    for index, layer in enumerate(model.layers):
        kind = "kda" if model.cfg.is_kda(index) else "mla"
        out.setdefault(kind if isinstance(layer.mlp, MoE) else f"{kind} dense", []).append(layer)
    return out


def decode_batches(space: Space, batch: int, context: int, count: int, generator: torch.Generator) -> list[StepBatch]:
    """`count` steps that each decode the token at position `context - 1` of `batch` sequences, other ones if it can."""
    out, device, page = [], space.pages.device, space.arena.layout.page_tokens
    for index in range(count):
        first = (index * batch) % max(space.slots - batch + 1, 1)
        slots = torch.arange(first + 1, first + batch + 1, dtype=torch.int32, device=device)
        table = space.table(batch, context, generator)
        last = torch.full((batch,), context - 1, device=device)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        rows = _rows(table, torch.arange(batch, device=device), last, page)
        tokens = torch.arange(batch, device=device)
        out.append(StepBatch(tokens, rows, tokens, DecodeBatch(slots, table, lens), None))
    return out


def prefill_batch(space: Space, context: int, new: int, table: Tensor) -> StepBatch:
    """A step that prefills `new` tokens of one sequence behind `context` cached ones; `table` int32 [1, pages]."""
    device, page = space.pages.device, space.arena.layout.page_tokens
    at = torch.arange(context, context + new, device=device)
    rows = _rows(table, torch.zeros_like(at), at, page)

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = torch.tensor([context > 0], device=device)
    prefill = PrefillBatch(numbers(1), table, numbers(0, new), numbers(context), state)
    tokens = torch.arange(new, device=device) % 256
    return StepBatch(tokens, rows, torch.tensor([new - 1], device=device), None, prefill)


def _rows(table: Tensor, sequences: Tensor, positions: Tensor, page: int) -> Tensor:
    """Cache rows int64 of tokens at `positions` of `sequences`; negative where no layer has rows to write."""
    if not table.shape[1]:
        return torch.full_like(positions, -1)
    return table[sequences, positions // page].long() * page + positions % page
