"""What a machine reaches in a large copy and a square matmul, measured as calls of operators are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.device_timing import CapturedCalls, rounds_of, time_on_device
from k3hal.debug.host_timing import host_seconds
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for

COPY_BYTES = {"cpu": 1 << 28}
COPY_BYTES_DEVICE = 1 << 30
MATMUL = {"cpu": 1024}
MATMUL_DEVICE = 8192
_COPY_BUDGET, _MATMUL_BUDGET = 0.3, 0.5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine reached in this run: bytes/s of a copy (read and written counted), FLOP/s of a square matmul."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str
    threads: int

    def seconds(self, flops: float, moved: float) -> float:
        """The least time that much work takes under both."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)


@torch.inference_mode()
def measure_ceilings(device: DeviceDescription, dtype: str) -> Ceilings:
    """Copy a large buffer and multiply two square matrices of the dtype, as fast as torch does.

    On random values: zeros take less power, and so less time.
    """
    runtime, where = runtime_for(device), torch.device(device.torch_device)
    size = COPY_BYTES.get(where.type, COPY_BYTES_DEVICE) // 8
    source = torch.randint(-(1 << 62), 1 << 62, (size,), device=where)
    targets = [torch.empty_like(source) for _ in range(2)]
    copy = _copy_seconds(runtime, source, targets)
    side = MATMUL.get(where.type, MATMUL_DEVICE)
    a, b = (torch.randn(side, side, device=where).to(getattr(torch, dtype)) for _ in range(2))
    products = [torch.empty_like(a) for _ in range(2)]
    matmul = _fastest(runtime, [lambda p=p: torch.mm(a, b, out=p) for p in products], _MATMUL_BUDGET)
    return Ceilings(2 * source.nbytes / copy, 2.0 * side**3 / matmul, dtype, torch.get_num_threads())


def _copy_seconds(runtime: DeviceRuntime, source: Tensor, targets: list[Tensor]) -> float:
    """The faster of a copy and of a kernel that reads as much and writes as much.

    In a graph a copy may be given to a copy engine, which on an H200 reaches two thirds of what a kernel does.
    """
    ways = [[lambda t=t: t.copy_(source) for t in targets]]
    if runtime.device.vendor != "cpu":
        ways.append([lambda t=t: torch.add(source, 1, out=t) for t in targets])
    return min(_fastest(runtime, way, _COPY_BUDGET) for way in ways)


def _fastest(runtime: DeviceRuntime, calls: list[Callable[[], Any]], budget: float) -> float:
    """Seconds of one of the calls, in a graph where the device has them."""
    if runtime.device.vendor == "cpu":
        return host_seconds(runtime, calls[0], budget)[0]
    for call in calls:
        call()
    graph = CapturedCalls(runtime, calls, rounds_of(runtime, calls)) if runtime.supports_graphs else None
    return time_on_device(runtime, calls, budget, graph).seconds
