"""Embedding lookup on CPU."""

from __future__ import annotations

from torch import Tensor

from k3hal.dispatch import provides


@provides("embed", name="gather")
def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return weight.index_select(0, ids.clamp_min(0)).masked_fill_((ids < 0).unsqueeze(-1), 0)
