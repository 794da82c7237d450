"""Where each packed token of a step sits, in one launch."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("step_metadata", name="fused", needs=NEEDS, supports=runs, graph_safe=True)
def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator."""
    return kernels("step_metadata").step_metadata(context_lens, new_lens, page_table, page_tokens, num_tokens)
