"""Causal convolution on CPU: shifted rows times taps, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.backends.cpu._rows import BLOCK_ELEMENTS, row_blocks
from k3hal.dispatch import provides

OTHER_BLOCKS = {"block_32k": 1 << 15, "block_2m": 1 << 21}
"""Elements worked on at a time: where a block fits a nearer cache, or calls cost more than misses do."""


def _in_blocks(elements: int) -> Callable[..., Tensor]:
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
            _filter(torch.cat((before, rows[:history])), taps, result[:history], elements)
            if rows.shape[0] > history:
                _filter(rows, taps, result[history:], elements)
            conv_state[slot] = torch.cat((before, rows[-history:]))[-history:]
        return out

    return causal_conv1d


causal_conv1d = provides(
    "causal_conv1d", name="shifted", tactics={name: _in_blocks(elements) for name, elements in OTHER_BLOCKS.items()}
)(_in_blocks(BLOCK_ELEMENTS))


def _filter(window: Tensor, taps: Tensor, out: Tensor, elements: int) -> None:
    """out[t] = SiLU(sum_j taps[j] window[t + j]) for the rows of `out`, which has W - 1 fewer than the window.

    In blocks of about so many elements.
    """
    width = taps.shape[0]
    for rows in row_blocks(out.shape[0], taps.shape[1], elements):
        wide = window[rows.start : rows.stop + width - 1].float()
        count = rows.stop - rows.start
        total = wide[:count] * taps[0]
        for j in range(1, width):
            total.addcmul_(wide[j : j + count], taps[j])
        out[rows] = silu(total, inplace=True)
