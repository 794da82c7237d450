"""How many sequences fit, and how much memory holds nothing: `bench cache --capacity`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from k3hal.engine.cache.geometry import CacheGeometry, k3_geometry

CONTEXTS = (8_192, 32_768, 131_072, 262_144, 1_048_576)
CONCURRENCIES = (1, 8, 64, 256)
RANKS = (1, 2, 4, 8, 16, 32)
KV_DTYPES = ("fp8", "bf16")


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """`concurrency` sequences of `context` tokens, their states and KV, in bytes of one rank.

    `useful` is what they need, `reserved` what they occupy, `waste` the fraction of it that holds nothing; `fits` in
    the budget, and `most` sequences of that context would.
    """

    context: int
    concurrency: int
    useful: int
    reserved: int
    waste: float
    fits: bool
    most: int


@dataclass(frozen=True, slots=True)
class PaddingRow:
    """Sizes at one number of ranks; `waste` is the fraction of a snapshot's pages that holds nothing."""

    tp: int
    kv: str
    page_bytes: int
    snapshot_bytes: int
    snapshot_pages: int
    waste: float


def capacity_report(geometry: CacheGeometry, budget: int) -> dict[str, Any]:
    """The tables: of `geometry` under a budget in bytes, and the padding at every number of ranks and KV dtype."""
    rows = [_row(geometry, budget, context, count) for context in CONTEXTS for count in CONCURRENCIES]
    padding = [_padding(tp, kv) for tp in RANKS for kv in KV_DTYPES]
    return {
        "budget": budget,
        "rows": [asdict(row) for row in rows],
        "padding": [asdict(row) for row in padding],
        "max_padding_waste": max(row.waste for row in padding),
    }


def _row(geometry: CacheGeometry, budget: int, context: int, concurrency: int) -> CapacityRow:
    """A row's own pages end with one that is half empty on average; a context of whole pages has none such."""
    pages = geometry.pages_for(context)
    each = pages * geometry.page_bytes + geometry.run_bytes
    useful = context * geometry.page_bytes // geometry.page_tokens + geometry.slot_bytes
    runs = geometry.runs_in(budget) - 1
    most = runs * geometry.pages_per_slot // (pages + geometry.pages_per_slot)
    return CapacityRow(
        context, concurrency, concurrency * useful, concurrency * each, 1 - useful / each, concurrency <= most, most
    )


def _padding(tp: int, kv: str) -> PaddingRow:
    geometry = k3_geometry(tp, "fp8" if kv == "fp8" else "bf16")
    return PaddingRow(
        tp, kv, geometry.page_bytes, geometry.slot_bytes, geometry.pages_per_slot, geometry.slot_waste
    )  # fmt: skip
