"""Pages between device and host memory: what is read, what is written, and when their end is told."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for
from k3hal.engine.tier.interface import PageTransfer, TransferDone
from k3hal.engine.tier.mover import PageMover

BYTES = 1 << 16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.device)])
def runtime(request: pytest.FixtureRequest) -> DeviceRuntime:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return runtime_for(probe(request.param))


def memory(runtime: DeviceRuntime, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Device pages with random bytes, and host pages."""
    device = runtime.allocate(pages * BYTES).view(pages, BYTES)
    device.copy_(torch.randint(0, 256, device.shape, dtype=torch.uint8))
    return device, runtime.allocate_pinned(pages * BYTES).view(pages, BYTES)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def all_finished(mover: PageMover, count: int) -> list[TransferDone]:
    ended: list[TransferDone] = []
    deadline = time.monotonic() + 20
    while len(ended) < count:
        assert time.monotonic() < deadline
        ended += mover.finished()
    return ended


def test_a_store_reads_what_was_there_before_the_step_wrote(runtime: DeviceRuntime) -> None:
    device, host = memory(runtime, 12)
    before = device.cpu().clone()
    mover = PageMover(device, host, runtime)
    source, target = pages(3, 4, 5, 9, 1, 2), pages(7, 8, 0, 1, 2, 5)
    mover.store([PageTransfer(1, source, target), PageTransfer(2, pages(11), pages(11))])
    device.zero_()
    assert sorted(done.epoch for done in all_finished(mover, 2)) == [1, 2]
    assert torch.equal(host[torch.from_numpy(target)], before[torch.from_numpy(source)])
    assert torch.equal(host[11], before[11])
    assert mover.finished() == ()


def test_a_load_writes_after_what_the_step_still_reads(runtime: DeviceRuntime) -> None:
    device, host = memory(runtime, 12)
    before = device.cpu().clone()
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    mover = PageMover(device, host, runtime)
    target, source = pages(6, 7, 2), pages(0, 1, 9)
    copied = device[torch.from_numpy(target).to(device.device)].clone()
    mover.load([PageTransfer(5, target, source)])
    assert all_finished(mover, 1) == [TransferDone(5)]
    assert torch.equal(copied.cpu(), before[torch.from_numpy(target)])
    assert torch.equal(device.cpu()[torch.from_numpy(target)], host[torch.from_numpy(source)])
    rest = [page for page in range(12) if page not in target]
    assert torch.equal(device.cpu()[rest], before[rest])


def test_after_draining_nothing_moves(runtime: DeviceRuntime) -> None:
    device, host = memory(runtime, 200)
    before = device.cpu().clone()
    mover = PageMover(device, host, runtime)
    mover.store([PageTransfer(epoch, pages(epoch), pages(199 - epoch)) for epoch in range(200)])
    mover.drain()
    assert torch.equal(host.flip(0), before)
    assert [done.epoch for done in mover.finished()] == list(range(200))


def test_nothing_to_move_is_no_movement(runtime: DeviceRuntime) -> None:
    device, host = memory(runtime, 2)
    mover = PageMover(device, host, runtime)
    mover.store([])
    mover.load([])
    mover.load([PageTransfer(1, pages(), pages())])
    assert all_finished(mover, 1) == [TransferDone(1)]
