"""SwiGLU activation on Acme's chips."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.dispatch import Call, Needs, No, Yes, provides

WIDEST = 16384
"""Columns of the result that fit the chip's scratchpad."""


def _supports(call: Call) -> Yes | No:
    width = call.dims["dim"]
    return Yes() if width <= WIDEST else No(f"needs dim <= {WIDEST}, this is {width}")


def _in_blocks(x: Tensor) -> Tensor:
    """64 rows at a time, so that the fp32 copies stay in the cache."""
    gate, up = x.chunk(2, dim=-1)
    out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    for start in range(0, x.shape[0], 64):
        rows = slice(start, start + 64)
        out[rows] = silu(gate[rows].float()) * up[rows].float()
    return out


@provides(
    "silu_and_mul",
    name="fused",
    needs=Needs(dtypes=("float32", "bfloat16")),
    supports=_supports,
    tactics={"in_blocks": _in_blocks},
)
def silu_and_mul(x: Tensor) -> Tensor:
    """See the operator."""
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)
