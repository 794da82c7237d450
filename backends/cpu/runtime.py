"""The host CPU as a device: work is finished when the call returns, so streams and events have nothing to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from k3hal.backends.cpu._huge_pages import map_bytes
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import CapacityError, UnsupportedError
from k3hal.dispatch.host import host_memory
from k3hal.dispatch.runtime import Event, MemoryFigures, Stream, process_group


@dataclass(frozen=True, slots=True)
class CpuEvent:
    """The moment it was recorded: everything before it is done. `at` in seconds of the process's clock."""

    at: float

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_since(self, earlier: Event) -> float:
        if not isinstance(earlier, CpuEvent):
            raise TypeError(f"{type(earlier).__name__} is another runtime's event")
        return self.at - earlier.at


class CpuStream:
    """Order of execution is order of calls."""

    def record(self) -> Event:
        return CpuEvent(time.perf_counter())

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return None

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()


class CpuRuntime:
    """`DeviceRuntime` of the host CPU. Memory figures honour the process's control group."""

    supports_graphs = False
    asynchronous = False

    def __init__(self, device: DeviceDescription) -> None:
        self.device = device
        self._stream = CpuStream()

    def memory(self) -> MemoryFigures:
        """Nobody counts: what this process holds is not its tensors alone."""
        return MemoryFigures(*host_memory())

    def reset_peak(self) -> None:
        return None

    def limit(self, num_bytes: int) -> None:
        return None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        free = self.memory().free
        if num_bytes > free:
            raise CapacityError(
                f"{num_bytes / 1e9:.2f} GB do not fit the {free / 1e9:.2f} GB of free memory",
                hint=f"{(num_bytes - free) / 1e9:.2f} GB are missing",
            )
        if not num_bytes:
            return torch.zeros(0, dtype=torch.uint8)
        return map_bytes(num_bytes)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        return self.allocate(num_bytes)

    def new_stream(self) -> Stream:
        return CpuStream()

    def current_stream(self) -> Stream:
        return self._stream

    def synchronize(self) -> None:
        return None

    def graph_pool(self) -> Any:
        raise UnsupportedError("a CPU captures no graphs", hint="run the work directly")

    def capture(self, work: Callable[[], None], pool: Any = None) -> Any:
        raise UnsupportedError("a CPU captures no graphs", hint="run the work directly")

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return work

    def new_group(self, ranks: Sequence[int]) -> Any:
        return process_group(ranks, "gloo")

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device="cpu").manual_seed(seed)
