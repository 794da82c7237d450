"""What one step of the model works on: packed tokens and where each sequence's cache lives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NULL_SLOT = 0


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """`N` sequences with one token each, the first `N` rows of the step.

    `slots` int32 [N] state slots (0 is the null slot of a padding row); `page_table` int32 [N, pages]; `seq_lens`
    int32 [N] tokens in the cache after this step, 0 for a padding row.
    """

    slots: Tensor
    page_table: Tensor
    seq_lens: Tensor

    @property
    def size(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """`N` sequences with one chunk each, packed after the decode rows.

    `cu_seqlens` int32 [N + 1] offsets from the first prefill row; `context_lens` int32 [N] tokens cached before this
    chunk; `has_state` bool [N]: whether the slot holds the state after `context_lens` tokens (False starts from zero
    and never reads the slot).
    """

    slots: Tensor
    page_table: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    has_state: Tensor

    @property
    def size(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """`N` sequences with a token and its drafts each, packed after the decode rows. Their states are not to be changed.

    `cu_seqlens` int32 [N + 1] offsets from the first of these R rows; `context_lens` int32 [N] tokens cached before, at
    least one. Each row seen as a sequence of its own: `row_tables` int32 [R, pages], `row_lens` int32 [R] tokens in the
    cache with it. All sequences made `width` rows long: `padded` int64 [N * width] the rows, each sequence's last one
    repeated, and `packed` int64 [R] where among those each row is; None where all are that long. Then the last rows of
    a sequence may be padding (`row_lens` 0), and a sequence of nothing else has slot 0.
    """

    slots: Tensor
    page_table: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    row_tables: Tensor
    row_lens: Tensor
    width: int
    padded: Tensor | None = None
    packed: Tensor | None = None

    @property
    def size(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step. Built once, passed down, never changed.

    `token_ids` int64 [T], decode rows first, then those of `verify`, then the prompts'; `kv_rows` int64 [T] each
    token's row in the paged cache (page * page tokens + offset), negative for padding rows; `logit_rows` int64 [R] the
    rows whose logits are wanted.
    """

    token_ids: Tensor
    kv_rows: Tensor
    logit_rows: Tensor
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
    verify: VerifyBatch | None = None

    @property
    def num_decodes(self) -> int:
        return self.decode.size if self.decode else 0

    @property
    def num_verify_rows(self) -> int:
        return self.verify.row_lens.shape[0] if self.verify else 0


@dataclass(frozen=True, slots=True)
class CacheViews:
    """The cache as the model sees it: views into one arena, in layer order within each kind.

    `kv[i]` [pages, page tokens, kv_lora + rope] of the i-th MLA layer, page stride arbitrary; `conv[i]`
    [slots, W - 1, 3 H K] in the activation dtype and `state[i]` [slots, H, V, K] fp32 of the i-th KDA layer, slot
    stride arbitrary. Page 0 and slot 0 are null: never allocated.
    """

    kv: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
