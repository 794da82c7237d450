"""Sampling on the CPU."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends._prefix_sample import drawn
from k3hal.dispatch import provides


@provides("sample", name="prefix")
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Greedy rows by one argmax; others by the ordered prefix of the vocabulary, or all of it where that must be."""
    out, rows = logits.argmax(dim=-1), temperature.nonzero()[:, 0]
    return drawn(out, rows, logits, temperature, top_k, top_p, min_p, uniform)
