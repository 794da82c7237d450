"""Times on a device with a queue: its own clock, cold caches, graphs where they may be; on a fake of one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from k3hal.debug import bench, device_timing, graph
from k3hal.debug.bench import bench_cases
from k3hal.debug.ceilings import Ceilings
from k3hal.debug.device_timing import (
    IN_A_ROW,
    LEAST,
    MOST,
    CapturedCalls,
    Times,
    replayable,
    rounds_of,
    time_on_device,
)
from k3hal.debug.execute import Calls
from k3hal.debug.rotation import RotatedCalls
from k3hal.debug.target import Target
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

from .queued_device import QueuedDevice


def _device() -> QueuedDevice:
    return QueuedDevice(replace(probe("cpu"), id="queued:0", vendor="nvidia"))


def _times(device: QueuedDevice, call: Any, budget: float, *, captured: bool, copies: int = 1) -> Times:
    calls = [call] * copies
    runtime: Any = device
    graph = CapturedCalls(runtime, calls, rounds_of(runtime, calls)) if captured else None
    return time_on_device(runtime, calls, budget, graph)


@pytest.mark.parametrize("copies", [1, 3, 64])
def test_a_captured_call_costs_its_work_and_no_launch_or_flush(copies: int) -> None:
    device = _device()
    times = _times(device, lambda: device.work(5e-6), 0.01, captured=True, copies=copies)
    assert times.seconds == pytest.approx(5e-6)
    assert times.in_a_row == pytest.approx(5e-6 + device.LAUNCH)
    assert times.spread == pytest.approx(1.0)
    assert (times.method, device.captures) == ("graph", 1)


def test_what_may_not_be_captured_is_timed_as_it_is_called() -> None:
    device = _device()
    times = _times(device, lambda: device.work(5e-6), 0.01, captured=False)
    assert times.seconds == pytest.approx(5e-6 + device.LAUNCH)
    assert times.in_a_row == pytest.approx(5e-6 + device.LAUNCH)
    assert (times.method, device.captures) == ("calls", 0)


@pytest.mark.parametrize("budget", [1e-9, 1e9])
def test_caches_are_emptied_before_every_sample_and_samples_are_bounded(budget: float) -> None:
    device = _device()
    _times(device, lambda: device.work(1e-6), budget, captured=True)
    assert device.flushed == (LEAST if budget < 1 else MOST) + 2


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 44 + 11), (2e-3, 22 + 11), (0.05, 11 + 11), (1.0, 5 + 5)])
def test_a_slow_call_is_made_a_few_times_only(monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int) -> None:
    device, made = _device(), []
    monkeypatch.setattr(device_timing, "time", SimpleNamespace(perf_counter=lambda: device.now))
    times = _times(device, lambda: made.append(device.work(seconds)), 1e-9, captured=False)
    assert len(made) == calls + 1  # that says how long it takes
    assert times.seconds == pytest.approx(seconds + device.LAUNCH)
    assert times.in_a_row == pytest.approx(seconds + device.LAUNCH)


def test_the_median_is_not_moved_by_a_slow_moment() -> None:
    device, costs = _device(), iter([1e-6] * ((LEAST + 2) * IN_A_ROW + 5) + [1.0] + [1e-6] * 1000)
    times = _times(device, lambda: device.work(next(costs)), 1e-9, captured=False)
    assert times.seconds == pytest.approx(1e-6 + device.LAUNCH)
    assert times.spread > 1


def test_calls_in_a_graph_are_enough_to_hide_its_start_and_not_more() -> None:
    def calls(copies: int) -> int:
        runtime: Any = _device()
        return rounds_of(runtime, [lambda: None] * copies) * copies

    assert [calls(copies) for copies in (1, 7, 20, 64)] == [IN_A_ROW, 21, IN_A_ROW, 64]


def test_a_graph_of_several_calls_replays_them_all() -> None:
    device = _device()
    replayable(device, lambda: device.work(2.0), IN_A_ROW)()  # pyright: ignore[reportArgumentType]
    device.synchronize()
    assert device.now == 2.0 * IN_A_ROW


@pytest.mark.parametrize(("safe", "method"), [(True, "graph"), (False, "calls")])
def test_bench_captures_only_what_says_it_may_be(
    case_of: Any, monkeypatch: pytest.MonkeyPatch, safe: bool, method: str
) -> None:
    case, device = case_of("rms_norm", "plain", "float32"), _device()
    fine = Verdict("rms_norm", "fake.rows", case.id, "Pass")

    def call(**_: Any) -> None:
        device.work(4e-6)

    monkeypatch.setattr(bench, "check", lambda *args, **kwargs: fine)
    monkeypatch.setattr(bench, "runtime_for", lambda _: device)
    monkeypatch.setattr(bench, "find_target", lambda *_: Target("rms_norm", "fake.rows", call, graph_safe=safe))
    monkeypatch.setattr(RotatedCalls, "stale", lambda *_: "")
    limits = {"float32": Ceilings(1e9, 1e9, "float32", 1)}
    (timing,) = bench_cases([case], ["fake"], device.device, limits, 0.001)
    assert timing.method == method
    assert timing.to_json()["in_a_row"] == timing.in_a_row
    assert timing.seconds == pytest.approx(4e-6 + (0 if safe else device.LAUNCH))
    least = max(timing.flops / 1e9, timing.bytes / 1e9)
    assert timing.roofline == pytest.approx(least / (timing.seconds or 0))


def test_replay_is_not_asked_of_what_is_not_graph_safe(case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("rms_norm", "plain", "float32")
    monkeypatch.setattr(graph, "runtime_for", lambda _: _device())
    never = Target("rms_norm", "fake.rows", lambda **_: pytest.fail("it was run"))
    assert graph.replayed(Calls(get_operator("rms_norm"), never), case) == []
