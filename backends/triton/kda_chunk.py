"""The gated delta rule in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from k3hal.backends.triton._kda import supports
from k3hal.backends.triton._triton import NEEDS, kernels
from k3hal.dispatch import provides

OTHERS = {"columns32": {"columns": 32}, "chunk16": {"chunk": 16}, "part64": {"part": 64}}


def _of(**tiles: int) -> Callable[..., Tensor]:
    def kda_chunk(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        has_state: Tensor,
    ) -> Tensor:
        """See the operator."""
        module = kernels("kda_chunk")
        shape = replace(module.EXACT, **tiles)
        return module.kda_chunk(q, k, v, g, beta, state, slots, cu_seqlens, has_state, shape)

    return kda_chunk


kda_chunk = provides(
    "kda_chunk", name="chunked", needs=NEEDS, supports=supports, graph_safe=True,
    tactics={name: _of(**tiles) for name, tiles in OTHERS.items()},
)(_of())  # fmt: skip
