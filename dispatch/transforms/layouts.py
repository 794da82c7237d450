"""Weights in the layouts that vendors read, made once at load: each function is one step of a provider's `prepare`."""

from __future__ import annotations

import torch
from torch import Tensor


def taps_first(conv_weight: Tensor) -> Tensor:
    """The convolution's weight [C, W] as [W, C]: a row for each tap, the oldest first."""
    return conv_weight.t().contiguous()


def taps_by_part(conv_weight: Tensor, parts: int = 3) -> Tensor:
    """The weight [P D, W] of channels packed as q, k, v as [P, W, D]."""
    return conv_weight.unflatten(0, (parts, -1)).transpose(1, 2).contiguous()


def up_first(w13: Tensor) -> Tensor:
    """Rows [gate; up] of every expert, [E, 2 I, ...], as [up; gate]."""
    return torch.cat(w13.chunk(2, dim=1)[::-1], dim=1)


def gate_up_interleaved(w13: Tensor, block: int = 1) -> Tensor:
    """Rows [gate; up] of every expert, [E, 2 I, ...], alternating: `block` rows of the gate, `block` of up, and so on.

    `block` divides I.
    """
    gate, up = (half.unflatten(1, (-1, block)) for half in w13.chunk(2, dim=1))
    return torch.stack((gate, up), dim=2).flatten(1, 3)


def gate_up_separated(w13: Tensor, block: int = 1) -> Tensor:
    """What `gate_up_interleaved` made, as it was."""
    gate, up = w13.unflatten(1, (-1, 2, block)).unbind(2)
    return torch.cat((gate.flatten(1, 2), up.flatten(1, 2)), dim=1)
