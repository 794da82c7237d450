"""The `DeviceRuntime` contract, run for every vendor that a backend has a runtime for and this machine a device of."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3hal.dispatch.describe import describe
from k3hal.dispatch.errors import BackendError, CapacityError, UnsupportedError
from k3hal.dispatch.probe import present_devices
from k3hal.dispatch.registry import default_registry
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for

from .toys import CPU, backend_module, registry_of


def _vendors() -> list[Any]:
    """Every vendor that a backend has a runtime for; all but the CPU's only on a machine that has one."""
    served = sorted({vendor for b in default_registry().backends.values() if b.runtime for vendor in b.vendors})
    return [pytest.param(v, id=v, marks=() if v == "cpu" else pytest.mark.device) for v in served]


@pytest.fixture(params=_vendors())
def runtime(request: pytest.FixtureRequest) -> DeviceRuntime:
    for device in present_devices():
        if device.vendor == request.param:
            return runtime_for(device)
    pytest.skip(f"no device of {request.param} is here")


def test_it_knows_its_device_and_its_memory(runtime: DeviceRuntime) -> None:
    assert runtime.device.present
    figures = runtime.memory()
    assert 0 < figures.free <= figures.total


def test_what_tensors_hold_is_counted_and_limited_or_not_at_all(runtime: DeviceRuntime) -> None:
    gc.collect()
    runtime.reset_peak()
    before = runtime.memory()
    if before.held is None:
        runtime.limit(0)
        assert runtime.allocate(1 << 20).numel() == 1 << 20
        assert before.peak is None
        return
    size = 100 << 20
    arena = runtime.allocate(size)
    during = runtime.memory()
    assert during.held is not None
    assert size <= during.held - before.held <= 2 * size
    del arena
    runtime.reset_peak()
    after = runtime.memory()
    assert (after.held, after.peak) == (before.held, before.held)
    try:
        runtime.limit(before.held + size // 2)
        with pytest.raises(CapacityError):
            runtime.allocate(size)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(size, dtype=torch.uint8, device=runtime.device.torch_device)
    finally:
        runtime.limit(before.total)
    assert runtime.allocate(size).numel() == size


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3_000_001])
def test_an_arena_is_zeroed_aligned_bytes_on_the_device(runtime: DeviceRuntime, num_bytes: int) -> None:
    arena = runtime.allocate(num_bytes)
    assert (arena.dtype, tuple(arena.shape), arena.device.type) == (
        torch.uint8,
        (num_bytes,),
        torch.device(runtime.device.torch_device).type,
    )
    assert not arena.any()
    assert arena.data_ptr() % 64 == 0


def test_an_arena_views_as_any_dtype(runtime: DeviceRuntime) -> None:
    arena = runtime.allocate(4096)
    arena.view(torch.float32)[7] = 1.5
    assert arena.view(torch.float32).sum().item() == 1.5


def test_what_does_not_fit_is_refused_with_what_is_missing(runtime: DeviceRuntime) -> None:
    gc.collect()
    with pytest.raises(CapacityError, match=r"GB are missing"):
        runtime.allocate(runtime.memory().total + (1 << 30))


def test_pinned_memory_is_host_memory(runtime: DeviceRuntime) -> None:
    buffer = runtime.allocate_pinned(1000)
    assert (buffer.dtype, tuple(buffer.shape), buffer.device.type) == (torch.uint8, (1000,), "cpu")
    arena = runtime.allocate(1000)
    arena.copy_(buffer.fill_(7), non_blocking=True)
    runtime.synchronize()
    assert bool((arena == 7).all())


def test_events_order_streams_and_measure_seconds(runtime: DeviceRuntime) -> None:
    side = runtime.new_stream()
    before = runtime.current_stream().record()
    arena = runtime.allocate(1 << 16)
    arena.fill_(1)
    side.wait(runtime.current_stream().record())
    with side.use():
        doubled = arena * 2
        after = side.record()
    after.synchronize()
    assert after.query()
    assert bool((doubled == 2).all())
    side.synchronize()
    runtime.synchronize()
    assert 0 <= after.elapsed_since(before) < 60


def test_graphs_replay_or_are_refused(runtime: DeviceRuntime) -> None:
    arena = runtime.allocate(64)

    def work() -> None:
        arena.add_(1)

    work()
    if not runtime.supports_graphs:
        with pytest.raises(UnsupportedError, match="graph"):
            runtime.capture(work)
        return
    graph = runtime.capture(work)
    runtime.synchronize()
    before = int(arena[0])
    graph.replay()
    graph.replay()
    runtime.synchronize()
    assert int(arena[0]) == before + 2


def test_a_graph_sees_what_its_tensors_hold_now_and_does_no_work_while_captured(runtime: DeviceRuntime) -> None:
    if not runtime.supports_graphs:
        pytest.skip(f"{runtime.device.id} has no graphs")
    source, target = runtime.allocate(64), runtime.allocate(64)

    def work() -> None:
        target.copy_(source + 1)

    work()
    source.fill_(5)
    graph = runtime.capture(work)
    runtime.synchronize()
    assert int(target[0]) == 1
    for value in (5, 9):
        source.fill_(value)
        graph.replay()
        runtime.synchronize()
        assert bool((target == value + 1).all())


def test_graphs_of_a_pool_use_the_same_memory_one_after_the_other(runtime: DeviceRuntime) -> None:
    if not runtime.supports_graphs:
        with pytest.raises(UnsupportedError, match="graph"):
            runtime.graph_pool()
        return
    source, targets = runtime.allocate(1 << 22), [runtime.allocate(1 << 22) for _ in range(2)]

    def work(target: torch.Tensor, add: int) -> None:
        target.copy_((source + add) * 2)

    pool = runtime.graph_pool()
    graphs = []
    for target, add in zip(targets, (1, 5), strict=True):
        work(target, add)
        graphs.append(runtime.capture(lambda target=target, add=add: work(target, add), pool))
    for value in (3, 4):
        source.fill_(value)
        for graph in (*graphs, *graphs):
            graph.replay()
        runtime.synchronize()
        assert [int(target[0]) for target in targets] == [2 * (value + 1), 2 * (value + 5)]


def test_work_beside_other_work_gives_its_result_in_order(runtime: DeviceRuntime) -> None:
    source = runtime.allocate(1 << 16)
    out = runtime.allocate(1 << 16)

    def work() -> None:
        for _ in range(3):
            join = runtime.beside(lambda: source * 2 + 1)
            longer = source + 5
            out.copy_(join() + longer)
            source.add_(1)

    work()
    if runtime.supports_graphs:
        graph = runtime.capture(work, runtime.graph_pool())
        source.fill_(0)
        for _ in range(5):
            graph.replay()
        expected = 14
    else:
        expected = 2
    runtime.synchronize()
    assert bool((out == 3 * expected + 6).all())


def test_work_on_a_stream_takes_time_that_its_events_show(runtime: DeviceRuntime) -> None:
    arena = runtime.allocate(1 << 24)
    stream = runtime.new_stream()
    with stream.use():
        first = stream.record()
        for _ in range(50):
            arena.add_(1)
        last = stream.record()
    assert runtime.asynchronous or last.query()
    stream.synchronize()
    assert first.query()
    assert last.elapsed_since(first) > 0


def test_events_of_another_runtime_are_refused(runtime: DeviceRuntime) -> None:
    with pytest.raises(TypeError, match="another runtime"):
        runtime.current_stream().record().elapsed_since(object())  # pyright: ignore[reportArgumentType]


def test_a_seed_gives_the_same_numbers_wherever_it_is_asked(runtime: DeviceRuntime) -> None:
    device = runtime.device.torch_device
    first, again, other = (torch.rand(8, generator=runtime.generator(s), device=device) for s in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_rank_needs_no_group_and_several_need_torch_distributed(runtime: DeviceRuntime) -> None:
    assert runtime.new_group([0]) is None
    with pytest.raises(UnsupportedError, match="not initialised"):
        runtime.new_group([0, 1])


def test_a_described_machine_has_no_runtime() -> None:
    with pytest.raises(UnsupportedError, match="mi355x describes a machine that is not here"):
        runtime_for(describe("mi355x"))


def test_a_vendor_nobody_serves_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no backend has a device runtime for x:0 \(acme\)"):
        runtime_for(replace(CPU, id="x:0", vendor="acme"))


@pytest.mark.parametrize(
    ("runtime_string", "message"),
    [
        ("no_such_module:Runtime", "cannot be loaded"),
        ("pathlib:Runtime", "cannot be loaded"),
        ("builtins:str", "is not a DeviceRuntime"),
        ("pathlib", "cannot be loaded"),
    ],
)
def test_a_manifest_that_names_no_runtime_is_an_error(runtime_string: str, message: str) -> None:
    registry = registry_of(backend_module("b", vendors=("acme",), runtime=runtime_string))
    device = replace(CPU, vendor="acme")
    with pytest.raises(BackendError, match=f"backend b: .*{message}"):
        runtime_for(device, registry)


def test_the_backend_of_the_highest_priority_gives_the_runtime() -> None:
    registry = registry_of(
        backend_module("a", vendors=("cpu",), priority=1, runtime="builtins:str"),
        backend_module("b", vendors=("cpu",), priority=2, runtime="k3hal.backends.cpu.runtime:CpuRuntime"),
    )
    assert type(runtime_for(CPU, registry)).__name__ == "CpuRuntime"
