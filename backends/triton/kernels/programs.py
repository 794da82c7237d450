"""What a launch may use of a device: how many programs it holds at once, and how much shared memory each; and how often
a kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

from k3hal.dispatch.stand_in import StandIn, stand_in

INTERPRETED = {"multiprocessor_count": 4, "max_shared_mem": 1 << 30}


def jit_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` of a kernel that is compiled once for all values of these arguments.

    Triton otherwise compiles anew, for seconds, where a number is the first to be 1, or to be or not to be a multiple
    of 16. Numbers that change with every batch do that under traffic.
    """
    return triton.jit(do_not_specialize=numbers)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _stands_for(device: torch.device) -> StandIn | None:
    """The machine that a tensor on no GPU is one of, while one is compiled for or emulated."""
    if device.type == "cuda":
        return None
    machine = stand_in()
    if machine is None and device.type == "meta":
        raise RuntimeError("a tensor on meta came to a kernel, and no machine stands behind it")
    return machine


def _properties(device: torch.device) -> dict[str, Any]:
    """As Triton's driver tells them; those of no device in particular under the interpreter, where none is emulated."""
    machine = _stands_for(device)
    return machine.properties if machine else _properties_here(device)


@cache
def _properties_here(device: torch.device) -> dict[str, Any]:
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


def arch(device: torch.device) -> str:
    """What Triton compiles for, as `sm_90` or `gfx950`; empty under the interpreter, where none is emulated."""
    machine = _stands_for(device)
    return machine.arch if machine else _arch_here(device)


@cache
def _arch_here(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def is_amd(device: torch.device) -> bool:
    """Whether Triton compiles for one of AMD's architectures."""
    return arch(device).startswith("gfx")


def is_hopper(device: torch.device) -> bool:
    """Whether Triton compiles for NVIDIA's sm_90."""
    return arch(device) == "sm_90"
