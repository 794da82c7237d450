"""Token embedding lookup."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


def _in_pieces(piece: int) -> Callable[..., Tensor]:
    def embed(ids: Tensor, weight: Tensor) -> Tensor:
        return kernels("embed").embed(ids, weight, piece)

    return embed


embed = provides(
    "embed",
    name="rows",
    needs=NEEDS,
    supports=runs,
    graph_safe=True,
    tactics={"piece1k": _in_pieces(1024), "piece8k": _in_pieces(8192)},
)(_in_pieces(2048))
