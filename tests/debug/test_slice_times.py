"""`bench slice`'s clock on a device whose clock counts the work it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from k3hal.bench import slice_times
from k3hal.bench.slice_times import SliceTimer
from k3hal.dispatch.probe import resolve_device

from .queued_device import QueuedDevice

EVICTION = 0.5


@dataclass
class Device(QueuedDevice):
    """Whose memory is real, and whose sums cost what emptying a cache does."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(resolve_device("h200"))
    monkeypatch.setattr(slice_times, "FLUSHED_BYTES", 1024)
    monkeypatch.setattr(slice_times, "_EVICTED_BYTES", 1024)
    monkeypatch.setattr(torch, "sum", lambda *_: made.work(EVICTION))
    return made


def _timer(device: Any) -> SliceTimer:
    return SliceTimer(device, 1.0)


def _calls(device: Device, *costs: float) -> list[Callable[[], Any]]:
    return [lambda cost=cost: device.work(cost) for cost in costs]


def test_chained_calls_are_timed_in_a_graph_without_their_launches(device: Device) -> None:
    time = _timer(device).chained(_calls(device, 2e-3, 4e-3))
    assert time.seconds == pytest.approx(3e-3) and device.captures == 1
    assert time.launched is not None and 0 < time.launched < 1


def test_the_cost_of_emptying_the_cache_is_taken_off(device: Device) -> None:
    timer = _timer(device)
    assert timer.alone(_calls(device, 2e-3, 4e-3, 6e-3)) == pytest.approx(4e-3)
    assert timer.alone(_calls(device, 8e-3)) == pytest.approx(8e-3)
    assert device.captures == 3, "the empty graph is measured once"


def test_long_calls_are_launched(device: Device) -> None:
    assert _timer(device).launched(_calls(device, 2e-3)).seconds == pytest.approx(3e-3)
    assert device.captures == 0


def test_without_graphs_calls_are_launched(device: Device) -> None:
    device.supports_graphs = False
    timer = _timer(device)
    assert timer.chained(_calls(device, 2e-3)).seconds == pytest.approx(3e-3)
    assert timer.alone(_calls(device, 2e-3)) == pytest.approx(3e-3)
