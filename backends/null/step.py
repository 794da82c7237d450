"""Step operators: every token drawn is id 0, every draft is accepted by nobody, nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("step_metadata", name="zeros", graph_safe=True)
def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All rows are padding rows."""
    positions = page_table.new_zeros(num_tokens, dtype=torch.int64)
    offsets = new_lens.new_zeros(new_lens.shape[0] + 1)
    return positions, positions - 1, offsets, new_lens.new_zeros(new_lens.shape)


@provides("copy_pages", name="zeros", graph_safe=True)
def copy_pages(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    return None


@provides("sample", name="zeros", graph_safe=True)
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    return logits.new_zeros(logits.shape[0], dtype=torch.int64)


@provides("verify_draft", name="zeros", graph_safe=True)
def verify_draft(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniform: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    return draft_ids.new_zeros(draft_ids.shape[0]), draft_ids.new_zeros(draft_ids.shape[0])
