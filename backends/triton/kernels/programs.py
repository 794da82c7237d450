"""What a launch may use of a device: how many programs it holds at once, and how much shared memory each; and how often
a kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

INTERPRETED = {"multiprocessor_count": 4, "max_shared_mem": 1 << 30}


def jit_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` of a kernel that is compiled once for all values of these arguments.

    Triton otherwise compiles anew, for seconds, where a number is the first to be 1, or to be or not to be a multiple
    of 16. Numbers that change with every batch do that under traffic.
    """
    return triton.jit(do_not_specialize=numbers)  # pyright: ignore[reportCallIssue, reportArgumentType]


@cache
def _properties(device: torch.device) -> dict[str, Any]:
    """As Triton's driver tells them; those of no device in particular under the interpreter."""
    if device.type == "cpu":
        return INTERPRETED
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)


def resident(device: torch.device, per_processor: int) -> int:
    """The programs of a launch that all run at the same time, where a processor holds so many."""
    return int(_properties(device)["multiprocessor_count"]) * per_processor


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    return int(_properties(device)["max_shared_mem"])


@cache
def arch(device: torch.device) -> str:
    """NVIDIA's name of what Triton compiles for, as `sm_90`; empty for every other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def is_hopper(device: torch.device) -> bool:
    """Whether Triton compiles for NVIDIA's sm_90."""
    return arch(device) == "sm_90"
