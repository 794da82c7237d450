"""One NPU of this process, through torch_npu."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from k3hal.backends.ascend._npu import LENGTHS, at_least_one
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import BackendError, CapacityError
from k3hal.dispatch.host_lengths import told
from k3hal.dispatch.runtime import Event, Graph, MemoryFigures, Stream, process_group

_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True)
class NpuEvent:
    """A timed event of torch_npu's."""

    event: Any

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_since(self, earlier: Event) -> float:
        if not isinstance(earlier, NpuEvent):
            raise TypeError(f"{type(earlier).__name__} is another runtime's event")
        return earlier.event.elapsed_time(self.event) * _MILLISECOND


@dataclass(frozen=True, slots=True)
class NpuStream:
    """A stream of torch_npu's; `npu` is its module."""

    npu: Any
    stream: Any

    def record(self) -> Event:
        event = self.npu.Event(enable_timing=True)
        event.record(self.stream)
        return NpuEvent(event)

    def wait(self, event: Event) -> None:
        if not isinstance(event, NpuEvent):
            raise TypeError(f"{type(event).__name__} is another runtime's event")
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def use(self) -> AbstractContextManager[Any]:
        return self.npu.stream(self.stream)


@dataclass(slots=True)
class LengthsGraph:
    """A graph with calls whose lengths stand in lists of the host: `parts` says which of them each has, in order."""

    graph: Any
    parts: tuple[slice, ...]
    stream: Callable[[], Stream]
    ended: Event | None = None

    def replay(self) -> None:
        """Waits for the replay before, whose lists these would overwrite. Raises `BackendError` where nobody tells the
        lengths of the step."""
        known = told()
        if known is None:
            raise BackendError("a graph with lists of lengths is replayed, and nobody tells the lengths")
        lists = [at_least_one(known.lengths[part]) for part in self.parts]
        if self.ended:
            self.ended.synchronize()
        self.graph.update(cpu_update_input=[{LENGTHS: lengths} for lengths in lists])
        self.graph.replay()
        self.ended = self.stream().record()


class NpuRuntime:
    """`DeviceRuntime` of one NPU. Products of fp32 factors are exact from when it is made: HF32, which rounds them, is
    turned off for the process."""

    supports_graphs = True
    asynchronous = True

    def __init__(self, device: DeviceDescription) -> None:
        self.device = device
        self._npu: Any = importlib.import_module("torch_npu").npu
        self._torch_device = torch.device(device.torch_device)
        self._npu.set_device(self._torch_device)
        self._npu.matmul.allow_hf32 = False
        self._npu.conv.allow_hf32 = False

    def memory(self) -> MemoryFigures:
        free, total = self._npu.mem_get_info(self._torch_device)
        held = self._npu.memory_reserved(self._torch_device)
        return MemoryFigures(total, free, held, self._npu.max_memory_reserved(self._torch_device))

    def reset_peak(self) -> None:
        self._npu.empty_cache()
        self._npu.reset_peak_memory_stats(self._torch_device)

    def limit(self, num_bytes: int) -> None:
        """The pools of graphs count too; what CANN takes without torch's allocator does not."""
        total = self._npu.get_device_properties(self._torch_device).total_memory
        self._npu.set_per_process_memory_fraction(min(num_bytes / total, 1.0), self._torch_device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        free = self.memory().free
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._torch_device)
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"{num_bytes / 1e9:.2f} GB do not fit the {free / 1e9:.2f} GB of free device memory",
                hint=f"{max(num_bytes - free, 0) / 1e9:.2f} GB are missing",
            ) from None

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()

    def new_stream(self) -> Stream:
        return NpuStream(self._npu, self._npu.Stream(self._torch_device))

    def current_stream(self) -> Stream:
        return NpuStream(self._npu, self._npu.current_stream(self._torch_device))

    def synchronize(self) -> None:
        self._npu.synchronize(self._torch_device)

    def graph_pool(self) -> Any:
        return self._npu.graph_pool_handle()

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        """Calls with lists of lengths are held where the host tells them, now and around every replay
        (`k3hal.dispatch.host_lengths`)."""
        graph, known = self._npu.NPUGraph(), told()
        before = len(known.asked) if known else 0
        # Of this thread alone: another may allocate memory or wait for an event meanwhile.
        mode = "thread_local"
        with self._npu.graph(graph, pool=pool, auto_dispatch_capture=known is not None, capture_error_mode=mode):
            work()
        parts = tuple(known.asked[before:]) if known else ()
        return LengthsGraph(graph, parts, self.current_stream) if parts else graph

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """In line: whether a second stream gains anything on an NPU was not measured."""
        return work

    def new_group(self, ranks: Sequence[int]) -> Any:
        return process_group(ranks, "hccl")

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self._torch_device).manual_seed(seed)
