"""Page copies on the CPU."""

from __future__ import annotations

from torch import Tensor

from k3hal.dispatch import provides


@provides("copy_pages", name="memcpy")
def copy_pages(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """Page by page without a temporary, unless a page is both source and destination."""
    sources, targets = src.tolist(), dst.tolist()
    if set(sources).isdisjoint(targets):
        for source, target in zip(sources, targets, strict=True):
            arena[target].copy_(arena[source])
    else:
        arena.index_copy_(0, dst, arena.index_select(0, src))
