"""How many bytes a page and a state slot take, and where each layer lies inside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.model.config import ModelConfig
from k3hal.model.requests import PAGE_TOKENS

_ALIGNMENT = 256
"""Bytes; what the strictest vendor kernel asks of a tensor's start."""

_STATE_DTYPE = torch.float32


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Sizes of the two kinds of cache memory of one model on one rank.

    A page holds `page_tokens` rows of `kv_width` for every MLA layer, layer after layer. A slot holds one sequence's
    recurrent state of every KDA layer (`[heads, V, K]` fp32), then its convolution window (`[conv_rows, 3 heads K]`),
    and occupies a run of `pages_per_slot` pages aligned to that run: slot `s` covers pages
    `[s * pages_per_slot, (s + 1) * pages_per_slot)`.
    """

    kv_layers: int
    kv_width: int
    kv_dtype: torch.dtype
    kda_layers: int
    heads: int
    head_dim: int
    conv_rows: int
    dtype: torch.dtype
    page_tokens: int = PAGE_TOKENS

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> CacheLayout:
        """The layout of a model with activations in `dtype`; `kv_dtype` None stores KV in `dtype` too.

        Without MLA layers tokens take no pages: the longest sequence then counts as one, so that a table of one page,
        the null page, is a table for all positions.
        """
        return cls(
            page_tokens=PAGE_TOKENS if config.mla_layers else max(config.max_position_embeddings, PAGE_TOKENS),
            kv_layers=len(config.mla_layers),
            kv_width=config.kv_lora_rank + config.qk_rope_head_dim,
            kv_dtype=kv_dtype or dtype,
            kda_layers=len(config.kda_layers),
            heads=config.kda_heads,
            head_dim=config.kda_head_dim,
            conv_rows=config.conv_width - 1,
            dtype=dtype,
        )

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes of one layer's rows in a page."""
        return self.page_tokens * self.kv_width * self.kv_dtype.itemsize

    @property
    def state_layer_bytes(self) -> int:
        return self.heads * self.head_dim * self.head_dim * _STATE_DTYPE.itemsize

    @property
    def conv_layer_bytes(self) -> int:
        return self.conv_rows * 3 * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes a slot uses; `run_bytes` is what it occupies."""
        return self.kda_layers * (self.state_layer_bytes + self.conv_layer_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; without MLA layers a page is just the unit slots are made of."""
        return max(_round_up(self.kv_layers * self.kv_layer_bytes or self.slot_bytes, _ALIGNMENT), _ALIGNMENT)

    @property
    def pages_per_slot(self) -> int:
        return self.geometry.pages_per_slot

    @property
    def run_bytes(self) -> int:
        return self.geometry.run_bytes

    @property
    def slot_waste(self) -> float:
        """Fraction of a slot's run that holds nothing."""
        return self.geometry.slot_waste

    @property
    def geometry(self) -> CacheGeometry:
        """The sizes alone."""
        return CacheGeometry(
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
            slot_bytes=self.slot_bytes,
            has_kv=self.kv_layers > 0,
        )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return self.geometry.pages_for(num_tokens)

    def runs_for(self, num_seqs: int, num_tokens: int) -> int:
        """Runs that always hold `num_seqs` sequences of `num_tokens` tokens each, the null run included."""
        pages = num_seqs * self.pages_for(num_tokens)
        return 1 + num_seqs + -(-pages // self.pages_per_slot)

    def longest_sequence(self, num_runs: int) -> int | None:
        """Tokens of the longest sequence an arena of `num_runs` runs holds alone; None where KV takes no memory."""
        if not self.kv_layers:
            return None
        return max(num_runs - 2, 0) * self.pages_per_slot * self.page_tokens
