"""Where each packed token of a step sits, on Hopper: launched in less time than a compiler's runtime takes to."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from k3hal.backends.nvidia.native.library import kernel, supported
from k3hal.dispatch import provides

THREADS, TOKENS_OF_ONE, MOST_PIECES = 128, 512, 16
ARGUMENTS = struct.Struct("@7Q4q4i")
"""`struct Arguments` of the kernel file: pointers, strides, numbers."""


@provides("step_metadata", name="hopper", supports=supported, graph_safe=True)
def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator."""
    count, device = new_lens.shape[0], page_table.device
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    rows = torch.empty(num_tokens, dtype=torch.int64, device=device)
    offsets = torch.empty(count + 1, dtype=torch.int32, device=device)
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    table_row, table_step = page_table.stride()
    arguments = ARGUMENTS.pack(
        context_lens.data_ptr(), new_lens.data_ptr(), page_table.data_ptr(), positions.data_ptr(), rows.data_ptr(),
        offsets.data_ptr(), lengths.data_ptr(), context_lens.stride(0), new_lens.stride(0), table_row, table_step,
        count, num_tokens, page_tokens, 0,
    )  # fmt: skip
    pieces = min(max(-(-num_tokens // TOKENS_OF_ONE), 1), MOST_PIECES)
    kernel("step_metadata", "step_metadata", (), 0, page_table.get_device()).launch(
        (count + 1, pieces), THREADS, arguments
    )
    return positions, rows, offsets, lengths
