"""`k3hal bench dispatch`: what a bound call costs over calling the provider's function, and what a plan costs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from k3hal.bench.machine import circumstances
from k3hal.bench.spread import Spread
from k3hal.checkpoints import full_size_config
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.plan import DispatchPlan, OpRequest, make_plan
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator
from k3hal.errors import UnsupportedError, UsageError
from k3hal.model.config import ModelConfig
from k3hal.model.presets import preset_config
from k3hal.model.requests import model_requests

SCHEMA = "k3hal.bench_dispatch/1"

LIMIT_NS = 1000.0
"""Most that a bound call may cost over a direct one; judged on an empty provider, whose own time hides nothing."""

_ROWS, _WIDTH = 1, 128
_EMPTY_CALLS, _NORM_CALLS = 20_000, 200


class _Module:
    """Holds a bound operator as the model's modules do: in an attribute that is read at each call."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op

    def seconds(self, args: tuple[Any, ...], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.op(*args)
        return time.perf_counter() - start


def _direct_seconds(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function(*args)
    return time.perf_counter() - start


def _empty(x: Any, weight: Any, eps: Any, residual: Any = None) -> None:
    """A provider that does nothing, so that the call itself is what is measured."""


def bench_dispatch(repeat: int, ops: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """The report, without its schema. Raises `UsageError`, `DispatchError`, `UnsupportedError`."""
    if repeat < 1:
        raise UsageError(f"--repeat is {repeat}", hint="it is at least 1")
    before = circumstances()
    device = probe("cpu")
    say("timing calls")
    plan = _plan(_nano(), device, "float32", ops)
    calls = {"empty": _empty_call(plan, repeat), "rms_norm": _norm_call(plan, repeat)}
    say("timing plans")
    plans = {
        "nano": _plan_times(_nano(), device, ops, repeat),
        "kimi-k3": _plan_times(full_size_config(), device, ops, repeat),
    }
    return {
        **before,
        "device": device.id,
        "repeat": repeat,
        "limit_ns": LIMIT_NS,
        "within_limit": calls["empty"]["overhead_ns"]["median"] < LIMIT_NS,
        "calls": calls,
        "bound": _bound(plan),
        "plans": plans,
    }


def _nano() -> ModelConfig:
    return ModelConfig.from_json(preset_config("nano"))


def _plan(config: ModelConfig, device: DeviceDescription, dtype: str, ops: str | None) -> DispatchPlan:
    selector = build_selector(ops, "warn")
    return make_plan(model_requests(config, dtype, dtype), selector, model="bench", device=device, dtype=dtype)


def _empty_call(plan: DispatchPlan, repeat: int) -> dict[str, Any]:
    """A provider without a body, bound by the plan in the place of a real one."""
    entry = next((e for e in plan.entries if e.request.op == "rms_norm"), None)
    if entry is None or entry.decision.chosen is None:
        raise UnsupportedError("no provider of rms_norm is chosen, so there is none to stand in for")
    provider = dataclasses.replace(entry.decision.chosen, fn=_empty)
    stand_in = dataclasses.replace(entry, decision=dataclasses.replace(entry.decision, chosen=provider))
    bound = dataclasses.replace(plan, entries=(stand_in,)).bind().fn("rms_norm")
    return _compare_calls(bound, _empty, (None, None, 1e-5, None), _EMPTY_CALLS, repeat)


def _norm_call(plan: DispatchPlan, repeat: int) -> dict[str, Any]:
    """The chosen provider of rms_norm itself, on one row of nano's width."""
    decision = next(e.decision for e in plan.entries if e.request.op == "rms_norm")
    function = decision.chosen.fn if decision.chosen else get_operator("rms_norm").reference
    args = (torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH), 1e-5, None)
    return _compare_calls(plan.bind().fn("rms_norm"), function, args, _NORM_CALLS, repeat)


def _compare_calls(
    bound: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], calls: int, repeat: int
) -> dict[str, Any]:
    """Nanoseconds a call, in pairs of which each half goes first in turn."""
    module = _Module(bound)
    module.seconds(args, calls)
    through: list[float] = []
    straight: list[float] = []
    for number in range(repeat):
        if number % 2 == 0:
            through.append(module.seconds(args, calls))
            straight.append(_direct_seconds(function, args, calls))
        else:
            straight.append(_direct_seconds(function, args, calls))
            through.append(module.seconds(args, calls))
    scale = 1e9 / calls
    return {
        "same_function": bound is function,
        "bound_ns": dataclasses.asdict(Spread.of([t * scale for t in through])),
        "direct_ns": dataclasses.asdict(Spread.of([t * scale for t in straight])),
        "overhead_ns": dataclasses.asdict(Spread.of([(a - b) * scale for a, b in zip(through, straight, strict=True)])),
    }


def _bound(plan: DispatchPlan) -> dict[str, int]:
    """How many of a plan's bound callables are a provider's own function, a reference, or a composition."""
    ops = plan.bind()
    counts = {"provider": 0, "reference": 0, "composed": 0}
    for entry in plan.entries:
        layer = next(iter(entry.request.layers), None)
        bound = ops.fn(entry.request.op, layer, entry.request.phase)
        if entry.decision.chosen is not None and bound is entry.decision.chosen.fn:
            counts["provider"] += 1
        elif bound is get_operator(entry.request.op).reference:
            counts["reference"] += 1
        else:
            counts["composed"] += 1
    return counts


def _plan_times(config: ModelConfig, device: DeviceDescription, ops: str | None, repeat: int) -> dict[str, Any]:
    """Seconds to list a model's operators, to decide them, and to bind them, with a registry that is loaded."""
    listed: list[float] = []
    decided: list[float] = []
    bound: list[float] = []
    requests: list[OpRequest] = []
    for _ in range(repeat):
        start = time.perf_counter()
        requests = model_requests(config, "bfloat16", "bfloat16")
        at = time.perf_counter()
        plan = make_plan(requests, build_selector(ops, "warn"), model="bench", device=device, dtype="bfloat16")
        chosen = time.perf_counter()
        plan.bind()
        end = time.perf_counter()
        listed.append(at - start)
        decided.append(chosen - at)
        bound.append(end - chosen)
    times = {"requests": listed, "decide": decided, "bind": bound}
    return {
        "layers": config.num_layers,
        "entries": len(requests),
        **{name: dataclasses.asdict(Spread.of(values)) for name, values in times.items()},
    }
