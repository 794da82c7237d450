"""How many bytes a page and a state snapshot take, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """Sizes of the two kinds of cache memory on one rank.

    A page holds `page_tokens` tokens of KV and takes `page_bytes`. A snapshot, like a running sequence's slot, is one
    recurrent state of `slot_bytes` in an aligned run of `pages_per_slot` pages. Without `has_kv` tokens take no pages.
    """

    page_tokens: int
    page_bytes: int
    slot_bytes: int
    has_kv: bool = True

    @property
    def pages_per_slot(self) -> int:
        return max(-(-self.slot_bytes // self.page_bytes), 1)

    @property
    def run_bytes(self) -> int:
        return self.pages_per_slot * self.page_bytes

    @property
    def slot_waste(self) -> float:
        """Fraction of a run that holds nothing when it is a slot."""
        return 1.0 - self.slot_bytes / self.run_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens) if self.has_kv else 0

    def runs_in(self, budget: int) -> int:
        """Runs of an arena with `budget` bytes to hand out; the null run comes on top."""
        return 1 + budget // self.run_bytes


_KDA_LAYERS, _MLA_LAYERS, _HEADS, _HEAD_DIM, _KV_WIDTH, _CONV_ROWS = 69, 24, 96, 128, 576, 3


def k3_geometry(
    tp: int = 8, kv: Literal["fp8", "bf16"] = "fp8", page_tokens: int = 128, *, draft_layers: int = 0
) -> CacheGeometry:
    """Full-size K3 on one of `tp` ranks: fp32 states, bf16 convolution windows (spec k3_architecture §2, §3).

    The KV of `draft_layers` attention layers of a drafter, as wide as the model's, lies in the same pages.
    """
    if tp < 1 or _HEADS % tp:
        raise ValueError(f"{_HEADS} heads do not divide over {tp} ranks")
    heads = _HEADS // tp
    state = heads * _HEAD_DIM * _HEAD_DIM * 4
    conv = _CONV_ROWS * 3 * heads * _HEAD_DIM * 2
    return CacheGeometry(
        page_tokens=page_tokens,
        page_bytes=(_MLA_LAYERS + draft_layers) * page_tokens * _KV_WIDTH * (1 if kv == "fp8" else 2),
        slot_bytes=_KDA_LAYERS * (state + conv),
    )
