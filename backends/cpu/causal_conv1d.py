"""Causal convolution on CPU: shifted rows times taps, a block of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.backends.cpu._rows import row_blocks
from k3hal.dispatch import provides


@provides("causal_conv1d", name="shifted")
def causal_conv1d(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """See the operator."""
    out, taps = torch.zeros(x.shape, dtype=x.dtype), weight.t().contiguous()
    starts, history = cu_seqlens.tolist(), taps.shape[0] - 1
    for n, (slot, known) in enumerate(zip(slots.tolist(), has_state.tolist(), strict=True)):
        rows, result = x[starts[n] : starts[n + 1]], out[starts[n] : starts[n + 1]]
        if slot == 0 or rows.shape[0] == 0:
            continue
        before = conv_state[slot] if known else torch.zeros_like(conv_state[slot])
        _filter(torch.cat((before, rows[:history])), taps, result[:history])
        if rows.shape[0] > history:
            _filter(rows, taps, result[history:])
        conv_state[slot] = torch.cat((before, rows[-history:]))[-history:]
    return out


def _filter(window: Tensor, taps: Tensor, out: Tensor) -> None:
    """out[t] = SiLU(sum_j taps[j] window[t + j]) for the rows of `out`, which has W - 1 fewer than the window."""
    width = taps.shape[0]
    for rows in row_blocks(out.shape[0], taps.shape[1]):
        wide = window[rows.start : rows.stop + width - 1].float()
        count = rows.stop - rows.start
        total = wide[:count] * taps[0]
        for j in range(1, width):
            total.addcmul_(wide[j : j + count], taps[j])
        out[rows] = silu(total, inplace=True)
