"""Sampling without sorting the vocabulary."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("sample", name="bins", needs=NEEDS, supports=runs, graph_safe=True)
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """See the operator."""
    return kernels("sample").sample(logits, temperature, top_k, top_p, min_p, uniform)
