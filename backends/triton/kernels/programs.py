"""How many programs a device holds at once."""

from __future__ import annotations

from functools import cache

import torch

INTERPRETED = 8


@cache
def resident(device: torch.device, per_processor: int) -> int:
    """The programs of a launch that all run at the same time; a fixed few under the interpreter."""
    if device.type == "cpu":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count * per_processor
