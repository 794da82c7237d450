"""The NPU's device runtime over a torch_npu that is the CPU: what it asks of the library, by names its wheel has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from k3hal.dispatch.describe import describe
from k3hal.dispatch.errors import BackendError, CapacityError
from k3hal.dispatch.host_lengths import lengths_of, telling
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for


class FakeEvent:
    """Host time, counted in records."""

    recorded = 0
    waited: ClassVar[list[int]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        FakeEvent.recorded += 1
        self.at = FakeEvent.recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is queued."""
        FakeEvent.waited.append(self.at)

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1000.0 * (later.at - self.at)


class FakeGraph:
    """A graph that says what is asked of it."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        self.log.append(("update", cpu_update_input))

    def replay(self) -> None:
        self.log.append("replay")


class FakeNpu(SimpleNamespace):
    """The part of `torch_npu.npu` that the runtime uses."""

    def __init__(self) -> None:
        super().__init__(
            matmul=SimpleNamespace(allow_hf32=True), conv=SimpleNamespace(allow_hf32=True), Event=FakeEvent, log=[],
            Stream=self._stream, current_stream=self._stream, NPUGraph=lambda: FakeGraph(self.log),
        )  # fmt: skip

    def set_device(self, device: torch.device) -> None:
        self.log.append(("set_device", device))

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 6 << 30, 8 << 30

    def memory_reserved(self, device: torch.device) -> int:
        return 1 << 30

    def max_memory_reserved(self, device: torch.device) -> int:
        return 2 << 30

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=8 << 30)

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.log.append(("fraction", fraction))

    def _stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.log.append(("wait", event)), synchronize=lambda: None)

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextmanager
    def graph(self, graph: Any, pool: Any, auto_dispatch_capture: bool, capture_error_mode: str) -> Iterator[None]:
        self.log.append(("capture", pool, auto_dispatch_capture, capture_error_mode))
        yield


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    module, npu = ModuleType("torch_npu"), FakeNpu()
    monkeypatch.setattr(module, "npu", npu, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return npu


@pytest.fixture
def runtime(npu: FakeNpu) -> DeviceRuntime:
    return runtime_for(replace(describe("ascend_910c"), present=True, torch_device="cpu"))


def test_products_of_fp32_stay_exact(npu: FakeNpu, runtime: DeviceRuntime) -> None:
    assert npu.matmul.allow_hf32 is False and npu.conv.allow_hf32 is False
    assert npu.log == [("set_device", torch.device("cpu"))]


def test_memory_is_counted_and_bounded(npu: FakeNpu, runtime: DeviceRuntime) -> None:
    figures = runtime.memory()
    assert (figures.total, figures.free, figures.held, figures.peak) == (8 << 30, 6 << 30, 1 << 30, 2 << 30)
    runtime.limit(2 << 30)
    assert npu.log[-1] == ("fraction", 0.25)
    assert runtime.allocate(100).tolist() == [0] * 100


def test_too_much_is_refused_with_what_is_missing(runtime: DeviceRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(CapacityError, match=r"7\.52 GB do not fit the 6\.44 GB"):
        runtime.allocate(7 << 30)


def test_streams_and_events(npu: FakeNpu, runtime: DeviceRuntime) -> None:
    stream = runtime.new_stream()
    first, second = stream.record(), runtime.current_stream().record()
    stream.wait(first)
    assert npu.log[-1][0] == "wait" and second.query()
    assert second.elapsed_since(first) == 1.0
    with stream.use():
        second.synchronize()
    with pytest.raises(TypeError, match="another runtime's event"):
        stream.wait(object())  # pyright: ignore[reportArgumentType]


def test_a_capture_is_of_this_thread_alone(npu: FakeNpu, runtime: DeviceRuntime) -> None:
    ran: list[int] = []
    graph = runtime.capture(lambda: ran.append(1), runtime.graph_pool())
    graph.replay()
    assert ran == [1] and npu.log[-2:] == [("capture", "pool", False, "thread_local"), "replay"]
    assert runtime.beside(lambda: 3)() == 3


def test_a_replay_gives_the_lists_of_its_step(npu: FakeNpu, runtime: DeviceRuntime) -> None:
    lengths, ran = torch.full((3,), 99), []
    with telling([0, 0, 0]):
        graph = runtime.capture(
            lambda: ran.extend([lengths_of(lengths, slice(0, 2)), lengths_of(lengths, slice(2, 4))])
        )
        other = runtime.capture(lambda: None)
    assert ran == [[0, 0], [0]] and npu.log[-1] == ("capture", None, True, "thread_local")
    with telling([7, 0, 5]):
        graph.replay()
        other.replay()
    lists = [{"actual_seq_kvlen": [7, 1]}, {"actual_seq_kvlen": [5]}]
    assert npu.log[-3:] == [("update", lists), "replay", "replay"]
    ended, waits = FakeEvent.recorded, len(FakeEvent.waited)
    with telling([1, 1, 1]):
        graph.replay()
    assert FakeEvent.waited[waits:] == [ended], "lists of a replay under way are not overwritten"
    with pytest.raises(BackendError, match="nobody tells the lengths"):
        graph.replay()


def test_lengths_are_told_or_fetched() -> None:
    lengths = torch.tensor([4, 5, 6])
    assert lengths_of(lengths, slice(1, 3)) == [5, 6]
    with telling([1, 2, 3]) as told:
        assert lengths_of(lengths, slice(1, 3)) == [2, 3] and told.asked == [slice(1, 3)]
        assert lengths_of(lengths[:2], slice(0, 2)) == [4, 5] and len(told.asked) == 1
