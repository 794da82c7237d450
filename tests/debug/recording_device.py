"""A runtime on the CPU that has graphs: what torch ran while capturing is run again, into the same memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import MemoryFigures


class RecordedGraph(TorchDispatchMode):
    """As a real graph it holds places of tensors, and every value that the host has read."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.steps:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


@dataclass(frozen=True)
class _Now:
    at: float

    def elapsed_since(self, earlier: _Now) -> float:
        return self.at - earlier.at


@dataclass
class RecordingDevice:
    """A device that does everything at once. `captures` counts its graphs."""

    device: DeviceDescription = field(default_factory=lambda: replace(probe("cpu"), id="recording:0", vendor="nvidia"))
    supports_graphs: bool = True
    captures: int = 0

    def memory(self) -> MemoryFigures:
        return MemoryFigures(1 << 30, 1 << 30)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(64, dtype=torch.uint8)

    def current_stream(self) -> RecordingDevice:
        return self

    def record(self) -> _Now:
        return _Now(time.perf_counter())

    def synchronize(self) -> None:
        return None

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        self.captures += 1
        graph = RecordedGraph()
        with graph:
            work()
        return graph
