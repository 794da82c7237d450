"""One GPU of this process, through `torch.cuda`: NVIDIA's, or AMD's, which a torch built for ROCm calls the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import CapacityError
from k3hal.dispatch.runtime import Event, MemoryFigures, Stream, process_group

_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True)
class TorchEvent:
    """A timed event of torch's."""

    event: torch.cuda.Event

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_since(self, earlier: Event) -> float:
        if not isinstance(earlier, TorchEvent):
            raise TypeError(f"{type(earlier).__name__} is another runtime's event")
        return earlier.event.elapsed_time(self.event) * _MILLISECOND


@dataclass(frozen=True, slots=True)
class TorchStream:
    """A stream of torch's."""

    stream: torch.cuda.Stream

    def record(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return TorchEvent(event)

    def wait(self, event: Event) -> None:
        if not isinstance(event, TorchEvent):
            raise TypeError(f"{type(event).__name__} is another runtime's event")
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class TorchGpuRuntime:
    """`DeviceRuntime` of one GPU. Graphs are captured on a side stream, as CUDA and HIP want it."""

    supports_graphs = True
    asynchronous = True

    def __init__(self, device: DeviceDescription) -> None:
        self.device = device
        self._torch_device = torch.device(device.torch_device)
        self._side: torch.cuda.Stream | None = None

    def memory(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info(self._torch_device)
        held = torch.cuda.memory_reserved(self._torch_device)
        return MemoryFigures(total, free, held, torch.cuda.max_memory_reserved(self._torch_device))

    def reset_peak(self) -> None:
        torch.cuda.init()  # before that there are no counts to reset
        with torch.cuda.device(self._torch_device):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._torch_device)

    def limit(self, num_bytes: int) -> None:
        """The pools of graphs count too; what the driver and libraries take without torch's allocator does not."""
        total = torch.cuda.get_device_properties(self._torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(num_bytes / total, 1.0), self._torch_device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        free = self.memory().free
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._torch_device)
        except torch.cuda.OutOfMemoryError:
            raise CapacityError(
                f"{num_bytes / 1e9:.2f} GB do not fit the {free / 1e9:.2f} GB of free device memory",
                hint=f"{max(num_bytes - free, 0) / 1e9:.2f} GB are missing",
            ) from None

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def new_stream(self) -> Stream:
        return TorchStream(torch.cuda.Stream(self._torch_device))

    def current_stream(self) -> Stream:
        return TorchStream(torch.cuda.current_stream(self._torch_device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._torch_device)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._side = self._side or torch.cuda.Stream(self._torch_device)
        # Of this thread alone: another may allocate memory or wait for an event meanwhile.
        mode = "thread_local"
        with torch.cuda.device(self._torch_device), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            work()
        return graph

    def capture_parts(self, work: Callable[[Callable[[], None]], None], pool: Any) -> list[torch.cuda.CUDAGraph]:
        # torch.cuda.graph empties the allocator's cache whenever it begins: here once, not for every part.
        self._side = self._side or torch.cuda.Stream(self._torch_device)
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.device(self._torch_device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            with torch.cuda.stream(torch.cuda.Stream(self._torch_device)):
                begin()
                try:
                    work(cut)
                finally:
                    graphs[-1].capture_end()
        return graphs

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """A branch of the graph that is being captured. Otherwise launches take the host longer than two streams save.

        All that the branch allocates is used again only behind the next one's beginning, which waits for this stream's
        work: no tensor need be told which streams use it.
        """
        side = self._side
        if side is None or not torch.cuda.is_current_stream_capturing():
            return work
        side.wait_stream(torch.cuda.current_stream(self._torch_device))
        with torch.cuda.stream(side):
            result = work()

        def join() -> Any:
            torch.cuda.current_stream(self._torch_device).wait_stream(side)
            return result

        return join

    def new_group(self, ranks: Sequence[int]) -> Any:
        return process_group(ranks, "nccl")  # RCCL has that name too

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self._torch_device).manual_seed(seed)
