"""MLA's output gate in one pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides

BLOCK, OTHER_BLOCKS = 2048, (512, 1024, 4096)
"""Channels of a program."""


def _in_blocks(channels: int) -> Callable[..., Tensor]:
    def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
        """See the operator."""
        return kernels("sigmoid_gate").sigmoid_gate(x, gate, channels)

    return sigmoid_gate


sigmoid_gate = provides(
    "sigmoid_gate",
    name="fused",
    needs=NEEDS,
    supports=runs,
    graph_safe=True,
    tactics={f"block{channels}": _in_blocks(channels) for channels in OTHER_BLOCKS},
)(_in_blocks(BLOCK))
