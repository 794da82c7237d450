"""Page copies in one launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


def _holding(held_bytes: int) -> Callable[..., None]:
    def copy_pages(arena: Tensor, src: Tensor, dst: Tensor) -> None:
        kernels("copy_pages").copy_pages(arena, src, dst, held_bytes)

    return copy_pages


copy_pages = provides(
    "copy_pages",
    name="columns",
    needs=NEEDS,
    supports=runs,
    graph_safe=True,
    tactics={f"held{n}k": _holding(n << 10) for n in (8, 32)},
)(_holding(16 << 10))
