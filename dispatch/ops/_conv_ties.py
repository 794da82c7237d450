"""Inputs of samples whose convolution rounds to the same bf16 values in any arithmetic of fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

_ULPS, _LIKELY_ULPS = 24, 96
"""Of fp32: how far from the middle between two bf16 values a result stays, and what is looked at more closely."""
_ROUNDS = 32
_CHANNELS = 1536
"""Looked at together, so that 16,384 tokens take 100 MB."""


def off_ties(
    qkv: Tensor, conv_weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> None:
    """Moves values of `qkv` [T, C], in bf16, by single steps until no result of the convolution lies near a tie.

    The contract rounds the convolution's result. Near the middle between two bf16 values fp32 sums of another order
    round to another of them, and each is right; a query that is all but orthogonal to its own key then moves by
    hundreds of times that step (2 % of a result's row, in 1 of 4,000 such values). Where a golden takes sides, so would
    the comparison. What is near is decided in fp64, so that a sample is the same on every machine.

    Raises `RuntimeError` if some result stays near.
    """
    starts = cu_seqlens.tolist()
    for n, (slot, known) in enumerate(zip(slots.tolist(), has_state.tolist(), strict=True)):
        if slot == 0 or starts[n] == starts[n + 1]:
            continue
        rows, history = qkv[starts[n] : starts[n + 1]], conv_state[slot]
        history = history if known else torch.zeros_like(history)
        for c in range(0, rows.shape[1], _CHANNELS):
            part = slice(c, c + _CHANNELS)
            _one_sequence(rows[:, part], conv_weight[part], history[:, part])


def _one_sequence(rows: Tensor, weight: Tensor, history: Tensor) -> None:
    width = weight.shape[1]
    window = torch.cat((history, rows))
    sums = window[width - 1 :].float() * weight[:, -1]
    for j in range(width - 1):
        sums += window[j : j + rows.shape[0]].float() * weight[:, j]
    bits = silu(sums).view(torch.int32).bitwise_and_(0xFFFF)
    at = (bits - 0x8000).abs_().le_(_LIKELY_ULPS).nonzero().unbind(1)
    for _ in range(_ROUNDS):
        t, c = at
        taps = torch.stack([window[t + j, c].double() * weight[c, j].double() for j in range(width)])
        near = _near_tie(taps.sum(0))
        if not bool(near.any()):
            rows.copy_(window[width - 1 :])
            return
        t, c, taps = t[near], c[near], taps[:, near]
        # The input that counts most, of those that are not history.
        own = torch.arange(width).unsqueeze(1) + t >= width - 1
        moved = t + torch.where(own, taps.abs(), -1.0).argmax(0)
        window.view(torch.int16)[moved, c] += 1
        reached = moved + torch.arange(width).unsqueeze(1) - (width - 1)
        inside = (reached >= 0) & (reached < rows.shape[0])
        at = reached[inside], c.expand_as(reached)[inside]
    raise RuntimeError("some result of a sample stays near a tie")


def _near_tie(sums: Tensor) -> Tensor:
    """Whether the results of the convolution's fp64 sums are."""
    significand = torch.frexp(silu(sums))[0].abs() * 256
    return (significand - significand.floor() - 0.5).abs() <= _ULPS / 65536
