"""What our own Hopper kernels of KDA share: the calls they take, the weights and the rows as they read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.nvidia.native.library import supported
from k3hal.dispatch.call import Answer, Call, No

DIM, WIDTH = 128, 4
_ALIGNED = 16


def supports(call: Call, *others: str) -> Answer:
    """Whether the kernels are made for a call; `others` are reasons of the operator's own why not."""
    dim, width = call.dims.get("head_dim", DIM), call.dims.get("conv_width", WIDTH)
    reasons = list(others)
    if dim != DIM:
        reasons.append(f"needs head_dim {DIM}, this is {dim}")
    if width != WIDTH:
        reasons.append(f"needs conv_width {WIDTH}, this is {width}")
    answer = supported(call)
    if isinstance(answer, No):
        reasons += answer.reasons
    return No(*reasons) if reasons else answer


def laid_out(conv_weight: Tensor, A_log: Tensor, **others: Tensor) -> Mapping[str, Any]:
    """Taps as [W, C] and the gate's rate `exp(A_log)`."""
    return {"conv_weight": conv_weight.t().contiguous(), "A_log": A_log.exp(), **others}


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy whose rows begin at multiples of 16 bytes, which is what the kernels load at a time."""
    if x.data_ptr() % _ALIGNED == 0 and x.stride(0) * x.element_size() % _ALIGNED == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
