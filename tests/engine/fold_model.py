"""The model-free oracle: a model whose cache cells are hashes of the exact token prefix.

It reads its cells through real page tables, slots and arena views, checks each one, and makes logits out of the hash,
so a wrong, stale or foreign cell is found where it is read and also changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.batch import CacheViews, StepBatch

VOCAB = 29
_MASK = 2**64 - 1
_LAYERS = (0, 0x9E3779B97F4A7C15)
"""What each layer's cells are xored with, so that two layers never hold the same bytes."""


def fold_layout(page_tokens: int = 4) -> CacheLayout:
    """Two KV and two KDA layers of the smallest cells that hold a hash; a slot takes three pages."""
    return CacheLayout(
        kv_layers=2,
        kv_width=4,
        kv_dtype=torch.float32,
        kda_layers=2,
        heads=1,
        head_dim=6,
        conv_rows=3,
        dtype=torch.float32,
        page_tokens=page_tokens,
    )


def fold(prefix: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    x = (prefix * 0x100000001B3 + token + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 27)


def fold_logits(prefix: int) -> np.ndarray:
    """fp32 [VOCAB] in [0, 6): the same for the same prefix, unrelated for others."""
    return np.array([fold(prefix, 1000 + j) % 6007 for j in range(VOCAB)], np.float32) / np.float32(1001)


def _pack(value: int) -> list[float]:
    return [float(value >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]


def _unpack(cell: Sequence[float]) -> int:
    return sum(int(part) << shift for part, shift in zip(cell, (0, 16, 32, 48), strict=True))


class CellError(AssertionError):
    """A cell does not hold what the sequence left there."""


class FoldModel:
    """`StepModel` over `fold_layout`. `parents` remembers how each hash came about."""

    def __init__(self) -> None:
        self.parents: dict[int, tuple[int, int]] = {}
        self.cells_checked = 0
        self.fail_next = 0
        self.poison: set[int] = set()

    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("simulated kernel failure")
        tokens, kv_rows = batch.token_ids.tolist(), batch.kv_rows.tolist()
        hidden: list[list[float]] = []
        for slot, pages, context, begin, end in _spans(batch):
            assert slot > 0, "a sequence in the null slot"
            prefix = self._read(cache, slot, pages, context) if context else 0
            history = [-1.0] * 3 if not context else cache.conv[0][slot, :, 0].tolist()
            for t in range(begin, end):
                self.parents[fold(prefix, tokens[t])] = prefix, tokens[t]
                prefix = fold(prefix, tokens[t])
                _write_kv(cache, kv_rows[t], prefix)
                history = [*history[1:], float(tokens[t])]
                hidden.append(_pack(prefix))
            _write_state(cache, slot, prefix, history)
        return torch.tensor(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        prefixes = [_unpack(row) for row in hidden.tolist()]
        logits = np.stack([fold_logits(p) for p in prefixes])
        for i, prefix in enumerate(prefixes):
            if self.parents[prefix][1] in self.poison:
                logits[i, 3] = np.nan
        return torch.from_numpy(logits)

    def _read(self, cache: CacheViews, slot: int, pages: list[int], context: int) -> int:
        """Check every cell of a sequence and return its prefix' hash."""
        page_tokens = cache.kv[0].shape[1]
        prefix = 0
        tail: list[int] = []
        for t in range(context):
            page, offset = pages[t // page_tokens], t % page_tokens
            cells = {_unpack(kv[page, offset].tolist()) ^ mask for kv, mask in zip(cache.kv, _LAYERS, strict=True)}
            cell = cells.pop()
            if cells or self.parents.get(cell, (None,))[0] != prefix:
                raise CellError(f"KV of token {t} in page {page} does not continue its prefix")
            prefix = cell
            tail = [*tail[-2:], self.parents[cell][1]]
        for state, conv, mask in zip(cache.state, cache.conv, _LAYERS, strict=True):
            if state[slot].reshape(-1, 4).tolist() != [_pack(prefix ^ mask)] * 9:
                raise CellError(f"slot {slot} does not hold the state after {context} tokens")
            if not torch.equal(conv[slot, -len(tail) :, :], torch.tensor(tail).float()[:, None].expand(-1, 18)):
                raise CellError(f"slot {slot} does not hold the last inputs before token {context}")
        self.cells_checked += context + 1
        return prefix


def _spans(batch: StepBatch) -> list[tuple[int, list[int], int, int, int]]:
    """(slot, pages, context, first row, end row) of every sequence."""
    spans: list[tuple[int, list[int], int, int, int]] = []
    if (decode := batch.decode) is not None:
        for i in range(decode.size):
            context = int(decode.seq_lens[i]) - 1
            spans.append((int(decode.slots[i]), decode.page_table[i].tolist(), context, i, i + 1))
    if (prefill := batch.prefill) is not None:
        ends = (prefill.cu_seqlens + batch.num_decodes).tolist()
        for i in range(prefill.size):
            context = int(prefill.context_lens[i])
            assert bool(prefill.has_state[i]) == (context > 0)
            spans.append((int(prefill.slots[i]), prefill.page_table[i].tolist(), context, ends[i], ends[i + 1]))
    assert spans[-1][4] == batch.token_ids.shape[0], "rows that belong to no sequence"
    return spans


def _write_kv(cache: CacheViews, row: int, prefix: int) -> None:
    page, offset = divmod(row, cache.kv[0].shape[1])
    assert page >= 3, "a write into the null run"
    for kv, mask in zip(cache.kv, _LAYERS, strict=True):
        kv[page, offset] = torch.tensor(_pack(prefix ^ mask))


def _write_state(cache: CacheViews, slot: int, prefix: int, history: list[float]) -> None:
    for state, conv, mask in zip(cache.state, cache.conv, _LAYERS, strict=True):
        state[slot] = torch.tensor(_pack(prefix ^ mask) * 9).view(1, 6, 6)
        conv[slot] = torch.tensor(history)[:, None].expand(-1, 18)
