"""Bench on a device with graphs: calls rotate over copies, and a graph that is stale gets no time; on a fake of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug import bench, ceilings, rotation
from k3hal.debug.bench import Timing, bench_cases
from k3hal.debug.case import Case
from k3hal.debug.ceilings import Ceilings
from k3hal.debug.rotation import RotatedCalls
from k3hal.debug.target import Target
from k3hal.dispatch.registry import get_operator

from .recording_device import RecordingDevice

MakeCase = Callable[..., Case]
LIMITS = {"float32": Ceilings(1e9, 1e9, "float32", 1)}


def _timed(case: Case, target: Target, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> Timing:
    monkeypatch.setattr(bench, "runtime_for", lambda _: device)
    monkeypatch.setattr(bench, "find_target", lambda *_: target)
    (timing,) = bench_cases([case], ["x"], device.device, LIMITS, 1e-9)
    return timing


def _target(op: str, fn: Any, **promises: Any) -> Target:
    return Target(op, "fake.it", fn, **{"graph_safe": True, **promises})


def test_a_graph_of_rotated_calls_is_timed(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "MOST_COPIES", 7)
    case, device = case_of("rms_norm", "plain", "float32"), RecordingDevice()
    timing = _timed(case, _target("rms_norm", get_operator("rms_norm").reference), device, monkeypatch)
    assert timing.verdict.status == "Pass"
    assert (timing.method, timing.why, timing.cache, timing.copies) == ("graph", "", "cold", 7)
    assert timing.rotated_bytes == 6 * timing.bytes
    assert timing.floor == pytest.approx(timing.bytes / 1e9)
    assert (timing.seconds or 0) > 0 and (timing.in_a_row or 0) > 0
    assert Timing.from_json(timing.to_json()).to_json() == timing.to_json()


def test_states_are_mutated_in_their_own_copies_and_checked_after_replays(
    case_of: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "MOST_COPIES", 3)
    case = case_of("attn_res_mix", "add", "float32")
    timing = _timed(
        case, _target("attn_res_mix", get_operator("attn_res_mix").reference), RecordingDevice(), monkeypatch
    )
    assert (timing.verdict.status, timing.method, timing.copies) == ("Pass", "graph", 3)


def test_a_stale_graph_is_a_failure_without_a_time(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host read while capturing is in the graph for good."""

    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        first = float(x.flatten()[0].item())
        return gate * torch.sigmoid(gate) * up + (first - x.flatten()[0])

    case = case_of("silu_and_mul", "tiny", "float32")
    timing = _timed(case, _target("silu_and_mul", silu_and_mul), RecordingDevice(), monkeypatch)
    assert (timing.verdict.status, timing.seconds) == ("Fail", None)
    assert any("a replayed graph gives another out" in problem for problem in timing.verdict.problems)


def test_a_result_written_to_one_place_by_all_is_no_pass(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "MOST_COPIES", 2)
    kept: list[Tensor] = []

    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        kept[:] = kept or [torch.empty_like(gate)]
        return kept[0].copy_(gate * torch.sigmoid(gate) * up)

    timing = _timed(
        case_of("silu_and_mul", "tiny", "float32"),
        _target("silu_and_mul", silu_and_mul), RecordingDevice(), monkeypatch,
    )  # fmt: skip
    assert (timing.verdict.status, timing.seconds) == ("Fail", None)


@pytest.mark.parametrize(
    ("safe", "graphs", "why"),
    [(False, True, "fake.it does not say that it may be captured"), (True, False, "recording:0 has no graphs")],
)
def test_without_a_graph_the_reason_is_said(
    case_of: MakeCase, monkeypatch: pytest.MonkeyPatch, safe: bool, graphs: bool, why: str
) -> None:
    device = RecordingDevice(supports_graphs=graphs)
    target = _target("silu_and_mul", get_operator("silu_and_mul").reference, graph_safe=safe)
    timing = _timed(case_of("silu_and_mul", "tiny", "float32"), target, device, monkeypatch)
    assert (timing.method, timing.why, device.captures) == ("calls", why, 0)
    assert (timing.seconds or 0) > 0


def test_what_raises_while_it_is_captured_is_timed_as_calls(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(RecordingDevice):
        def capture(self, work: Callable[[], None]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    target = _target("silu_and_mul", get_operator("silu_and_mul").reference)
    timing = _timed(case_of("silu_and_mul", "tiny", "float32"), target, Refusing(), monkeypatch)
    assert timing.method == "calls"
    assert timing.why == "capturing it raised RuntimeError: operation not permitted when stream is capturing"


def test_a_large_case_is_judged_where_it_runs(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(case_of("kda_decode", "one", "float32"), tags=frozenset({"device", "bench"}))
    monkeypatch.setattr(bench, "peer_of", lambda *_: pytest.fail("a CPU provider was asked"))
    monkeypatch.setattr(rotation, "MOST_COPIES", 2)
    operator = get_operator("kda_decode")
    timing = _timed(case, _target("kda_decode", operator.reference, graph_safe=False), RecordingDevice(), monkeypatch)
    assert timing.verdict.status == "Pass"

    def wrong(**args: Any) -> Tensor:
        return operator.reference(**args) * 1.1

    timing = _timed(case, _target("kda_decode", wrong), RecordingDevice(), monkeypatch)
    assert (timing.verdict.status, timing.seconds) == ("Fail", None)


def test_copies_stop_where_memory_does_and_warm_is_one(case_of: MakeCase) -> None:
    case, device = case_of("rms_norm", "plain", "float32"), RecordingDevice()
    target = _target("rms_norm", get_operator("rms_norm").reference)
    assert len(RotatedCalls(case, target, device, "warm", 1.0).calls) == 1  # pyright: ignore[reportArgumentType]
    assert len(RotatedCalls(case, target, device, "cold", 1e12).calls) == 2  # pyright: ignore[reportArgumentType]
    short = replace(case, args={**case.args, "x": torch.zeros(1 << 26)})
    copies = RotatedCalls(short, target, device, "cold", 1.0)  # pyright: ignore[reportArgumentType]
    assert len(copies.calls) == 1


def test_ceilings_of_a_device_are_measured_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice()
    monkeypatch.setattr(ceilings, "runtime_for", lambda _: device)
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(ceilings, "MATMUL", {"cpu": 16})
    monkeypatch.setattr(ceilings, "_COPY_BUDGET", 1e-9)
    monkeypatch.setattr(ceilings, "_MATMUL_BUDGET", 1e-9)
    found = ceilings.measure_ceilings(device.device, "float32")
    assert device.captures == 3
    assert found.bytes_per_s > 0 and found.flops_per_s > 0
