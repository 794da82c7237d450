"""Softmax attention over blocks of keys with a running maximum."""

from __future__ import annotations

import torch
from torch import Tensor


class Running:
    """Attention output of queries [G, M, ..] over all blocks seen so far."""

    def __init__(self) -> None:
        self.top: Tensor | None = None
        self.total = self.values = torch.empty(0)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Fold in scores [G, M, L] (scaled and masked; consumed) against values [G, L, V].

        Every row must have a finite score in the first block.
        """
        top = scores.amax(dim=-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(self.top, top)
        weights = scores.sub_(top).exp_()
        total, summed = weights.sum(dim=-1, keepdim=True), torch.bmm(weights, values)
        if self.top is not None:
            shrink = (self.top - top).exp_()
            total.add_(self.total * shrink)
            summed.add_(self.values * shrink)
        self.top, self.total, self.values = top, total, summed

    def result(self) -> Tensor:
        """[G, M, V], fp32."""
        return self.values / self.total
