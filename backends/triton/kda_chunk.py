"""The gated delta rule in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from k3hal.backends.triton._kda import supports
from k3hal.backends.triton._triton import NEEDS, kernels
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call

OTHERS = {"columns32": {"columns": 32}, "chunk16": {"chunk": 16}, "part64": {"part": 64}}
TRIPLE = {
    "triple": {"exact": "triple"},
    "triple_columns32": {"exact": "triple", "columns": 32},
    "triple_chunk16": {"exact": "triple", "chunk": 16},
}
"""By matrix units, each product as three of halves: AMD's compiler has none such."""


def _of(**tiles: Any) -> Callable[..., Tensor]:
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


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    others = OTHERS if call.device.vendor == "amd" else OTHERS | TRIPLE
    return {name: _of(**tiles) for name, tiles in others.items()}


kda_chunk = provides(
    "kda_chunk", name="chunked", needs=NEEDS, supports=supports, graph_safe=True, tactics=_tactics
)(_of())  # fmt: skip
