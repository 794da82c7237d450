"""What the Triton providers of KDA share: which calls they take, and the weights as their kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k3hal.backends.triton._triton import runs
from k3hal.dispatch.call import Answer, Call, No

HEAD_DIMS = (16, 32, 64, 128)


def supports(call: Call) -> Answer:
    """Whether a call's head size is one the kernels hold in registers as a tile."""
    dim = call.dims.get("head_dim", 128)
    if dim not in HEAD_DIMS:
        return No(f"needs head_dim {', '.join(map(str, HEAD_DIMS))}, this is {dim}")
    return runs(call)


def rate(A_log: Tensor, **others: Tensor) -> Mapping[str, Any]:
    """The gate's rate `exp(A_log)` for `A_log`."""
    return {"A_log": A_log.exp(), **others}


def laid_out(conv_weight: Tensor, A_log: Tensor, **others: Tensor) -> Mapping[str, Any]:
    """Taps as [W, C] and the gate's rate `exp(A_log)`."""
    return {"conv_weight": conv_weight.t().contiguous(), "A_log": A_log.exp(), **others}


CHUNK_TILES: Mapping[str, Mapping[str, int]] = {
    "columns64": {"columns": 64},
    "columns128": {"columns": 128, "scan_warps": 8, "stages": 1},
    "stages3": {"stages": 3},
    "part32": {"part": 32},
    "products_warps4": {"warps": 4},
}
"""Tactics of the chunked kernels, by what differs from the default (`kernels/kda_chunk.py: Tiles`)."""
