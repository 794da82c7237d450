"""Step metadata on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("step_metadata", name="vectorised")
def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """numpy on the tensors' own memory: a call there costs a fifth of a torch call."""
    context, new, table = context_lens.numpy(), new_lens.numpy(), page_table.numpy()
    cu_seqlens = np.zeros(new.size + 1, dtype=np.int32)
    np.cumsum(new, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    positions, kv_rows = np.zeros(num_tokens, dtype=np.int64), np.full(num_tokens, -1, dtype=np.int64)
    sequence = np.repeat(np.arange(new.size), new)
    positions[:total] = np.arange(total) + (context - cu_seqlens[:-1])[sequence]
    page, offset = np.divmod(positions[:total], page_tokens)
    kv_rows[:total] = table[sequence, page].astype(np.int64) * page_tokens + offset
    out = (positions, kv_rows, cu_seqlens, context + new)
    return torch.from_numpy(out[0]), torch.from_numpy(out[1]), torch.from_numpy(out[2]), torch.from_numpy(out[3])
