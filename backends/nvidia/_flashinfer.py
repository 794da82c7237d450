"""What the adapters of FlashInfer share: the releases they are written for, and scratch memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PACKAGE = "flashinfer-python"
SINCE_0_6_18, SINCE_0_7_2 = ">=0.6.18,<0.8", ">=0.7.2,<0.8"
"""Contracts are recorded of 0.6.18, 0.7.2.post1 and 0.7.4: for what binds in all three, or in the later two."""
BLACKWELL = ("sm_100", "sm_103")
_WORKSPACE = 128 << 20


@cache
def workspace(use: str, device: torch.device) -> Tensor:
    """128 MiB of one `use` on a device, zeroed once: kernels that count in it leave their counters at zero."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
