"""What a step needs beside the model, by torch: metadata and page copies, without a value going to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.dispatch import provides


@provides("step_metadata", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator. A row's sequence is how many end at it or before; comparisons need no sort and no search."""
    ends = new_lens.cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.cat((ends.new_zeros(1), ends))
    seq_lens = context_lens + new_lens
    if not new_lens.numel():
        nowhere = torch.zeros(num_tokens, dtype=torch.int64, device=page_table.device)
        return nowhere, nowhere - 1, cu_seqlens, seq_lens
    rows = torch.arange(num_tokens, dtype=torch.int32, device=page_table.device)
    live = rows < ends[-1]
    sequence = (rows.unsqueeze(1) >= ends).sum(1).clamp_max(new_lens.shape[0] - 1)
    first = context_lens - cu_seqlens[:-1]
    positions = torch.where(live, rows + first[sequence], 0).long()
    page = torch.div(positions, page_tokens, rounding_mode="floor")
    # A padding row looks at its stand-in's first entry, which may be garbage but is there.
    entry = page_table[sequence, page].long()
    kv_rows = torch.where(live, entry * page_tokens + positions - page * page_tokens, -1)
    return positions, kv_rows, cu_seqlens, seq_lens


@provides("copy_pages", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def copy_pages(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """See the operator. All pages are read before one is written."""
    arena.index_copy_(0, dst, arena.index_select(0, src))
