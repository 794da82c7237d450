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
    x = np.uint64(prefix * 0x100000001B3 & _MASK) ^ np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    return (x % np.uint64(6007)).astype(np.float32) / np.float32(1001)


_SHIFTS = np.array([0, 16, 32, 48], np.uint64)


def _pack(value: int) -> np.ndarray:
    """A hash as four exact floats."""
    return (np.uint64(value) >> _SHIFTS & np.uint64(0xFFFF)).astype(np.float32)


def _unpack(cells: np.ndarray) -> list[int]:
    """The hashes in cells [N, 4]; anything that is no packed hash (NaN, say) gives some other number."""
    parts = np.nan_to_num(cells, nan=1.0, posinf=1.0, neginf=1.0).astype(np.int64).astype(np.uint64)
    return np.bitwise_or.reduce(parts << _SHIFTS, axis=-1).tolist()


class CellError(AssertionError):
    """A cell does not hold what the sequence left there."""


class FoldModel:
    """`StepModel` over `fold_layout`. `parents` remembers how each hash came about."""

    def __init__(self) -> None:
        self.parents: dict[int, tuple[int, int]] = {}
        self.cells_checked = 0
        self.fail_next = 0
        self.poison: set[int] = set()
        self.accepted = 0
        self._verified: dict[int, list[tuple[int, list[float]]]] = {}

    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("simulated kernel failure")
        assert not self._verified, "drafts that were verified were not committed"
        cells = _Cells(cache)
        first_verify, end_verify = batch.num_decodes, batch.num_decodes + (batch.verify.size if batch.verify else 0)
        tokens, kv_rows = batch.token_ids.tolist(), batch.kv_rows.tolist()
        hidden: list[np.ndarray] = []
        for number, (slot, pages, context, begin, end) in enumerate(_spans(batch)):
            if not slot:
                assert set(kv_rows[begin:end]) == {-1}, "a padding row that would write"
                hidden += [_pack(0)] * (end - begin)
                continue
            assert context >= 0, "a sequence without tokens"
            after: list[tuple[int, list[float]]] = []
            prefix = self._read(cells, slot, pages, context) if context else 0
            history = cells.conv[0][slot, :, 0].tolist() if context else [-1.0] * 3
            real = [t for t in range(begin, end) if kv_rows[t] >= 0]
            assert real == list(range(begin, begin + len(real))) and real, "padding before a sequence's tokens"
            hidden_end = len(hidden) + end - begin
            for t in real:
                self.parents[fold(prefix, tokens[t])] = prefix, tokens[t]
                prefix = fold(prefix, tokens[t])
                cells.write_kv(kv_rows[t], prefix)
                history = [*history[1:], float(tokens[t])]
                hidden.append(_pack(prefix))
                after.append((prefix, history))
            hidden += [_pack(0)] * (hidden_end - len(hidden))
            if first_verify <= number < end_verify:
                self._verified[slot] = after
            else:
                cells.write_state(slot, prefix, history)
        return torch.from_numpy(np.stack(hidden))

    def commit(self, batch: StepBatch, cache: CacheViews, kept: Tensor) -> None:
        """The state after the last token that was kept of each sequence that verified drafts."""
        assert batch.verify is not None
        cells = _Cells(cache)
        for slot, count in zip(batch.verify.slots.tolist(), kept.tolist(), strict=True):
            if not slot:
                continue
            cells.write_state(slot, *self._verified.pop(slot)[count - 1])
            self.accepted += count - 1

    def logits(self, hidden: Tensor) -> Tensor:
        prefixes = _unpack(hidden.numpy())
        logits = np.stack([fold_logits(p) for p in prefixes])
        for i, prefix in enumerate(prefixes):
            # 0 is a padding row's.
            if prefix and self.parents[prefix][1] in self.poison:
                logits[i, 3] = np.nan
        return torch.from_numpy(logits)

    def _read(self, cells: _Cells, slot: int, pages: list[int], context: int) -> int:
        """Check every cell of a sequence and return its prefix' hash."""
        prefix, tail = 0, []
        first, second = (cells.read_kv(layer, pages, context) for layer in (0, 1))
        for t in range(context):
            cell = first[t] ^ _LAYERS[0]
            if cell != second[t] ^ _LAYERS[1] or self.parents.get(cell, (None,))[0] != prefix:
                raise CellError(f"KV of token {t} does not continue its prefix (pages {pages})")
            prefix = cell
            tail = [*tail[-2:], self.parents[cell][1]]
        for state, conv, mask in zip(cells.state, cells.conv, _LAYERS, strict=True):
            if (state[slot].reshape(-1, 4) != _pack(prefix ^ mask)).any():
                raise CellError(f"slot {slot} does not hold the state after {context} tokens")
            if (conv[slot, -len(tail) :] != np.array(tail, np.float32)[:, None]).any():
                raise CellError(f"slot {slot} does not hold the last inputs before token {context}")
        self.cells_checked += context + 1
        return prefix


class _Cells:
    """The arena's views as arrays over the same memory."""

    def __init__(self, cache: CacheViews) -> None:
        self.kv = [view.numpy() for view in cache.kv]
        self.state = [view.numpy() for view in cache.state]
        self.conv = [view.numpy() for view in cache.conv]
        self.page_tokens = cache.kv[0].shape[1]

    def read_kv(self, layer: int, pages: list[int], count: int) -> list[int]:
        index = np.arange(count)
        return _unpack(self.kv[layer][np.array(pages)[index // self.page_tokens], index % self.page_tokens])

    def write_kv(self, row: int, prefix: int) -> None:
        page, offset = divmod(row, self.page_tokens)
        assert page >= 3, "a write into the null run"
        for kv, mask in zip(self.kv, _LAYERS, strict=True):
            kv[page, offset] = _pack(prefix ^ mask)

    def write_state(self, slot: int, prefix: int, history: list[float]) -> None:
        for state, conv, mask in zip(self.state, self.conv, _LAYERS, strict=True):
            state[slot] = np.tile(_pack(prefix ^ mask), 9).reshape(1, 6, 6)
            conv[slot] = np.array(history, np.float32)[:, None]


def _spans(batch: StepBatch) -> list[tuple[int, list[int], int, int, int]]:
    """(slot, pages, context, first row, end row) of every sequence."""
    spans: list[tuple[int, list[int], int, int, int]] = []
    if (decode := batch.decode) is not None:
        for i in range(decode.size):
            context = int(decode.seq_lens[i]) - 1
            spans.append((int(decode.slots[i]), decode.page_table[i].tolist(), context, i, i + 1))
    if (verify := batch.verify) is not None:
        ends = (verify.cu_seqlens + batch.num_decodes).tolist()
        for i, context in enumerate(verify.context_lens.tolist()):
            assert context > 0 or not verify.slots[i], "drafts before anything is computed"
            spans.append((int(verify.slots[i]), verify.page_table[i].tolist(), context, ends[i], ends[i + 1]))
    if (prefill := batch.prefill) is not None:
        ends = (prefill.cu_seqlens + (spans[-1][4] if spans else 0)).tolist()
        for i in range(prefill.size):
            context = int(prefill.context_lens[i])
            assert bool(prefill.has_state[i]) == (context > 0)
            spans.append((int(prefill.slots[i]), prefill.page_table[i].tolist(), context, ends[i], ends[i + 1]))
    assert spans[-1][4] == batch.token_ids.shape[0], "rows that belong to no sequence"
    return spans
