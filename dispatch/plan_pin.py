"""Pinning a saved plan on this machine, and comparing two plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from k3hal.dispatch.call import Call
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import PlanError
from k3hal.dispatch.evidence import level_of
from k3hal.dispatch.plan import DispatchPlan, OpRequest, PlanEntry
from k3hal.dispatch.plan_file import Choice, SavedEntry, SavedPlan
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.registry import Registry, get_operator
from k3hal.dispatch.select import (
    COMPOSED,
    REFERENCE,
    Consideration,
    Decision,
    answer,
    offered,
    own_weights,
    part_calls,
)
from k3hal.dispatch.words import nearest

Key = tuple[str, str, int | None]


def pin_plan(
    plan: SavedPlan,
    requests: Iterable[OpRequest],
    registry: Registry,
    *,
    model: str,
    device: DeviceDescription,
    dtype: str,
) -> DispatchPlan:
    """The plan that runs exactly the providers of a saved one.

    A file may give one request's layers in several entries, so that a hand-edited one can differ by layer. Raises
    `PlanError` for the first entry that is missing, left over, made for other dims, or cannot run on this machine.
    """
    covering, requests = {key: entry for entry in plan.entries for key in _keys(entry)}, tuple(requests)
    # Before any dims are compared: a plan for other operators may also have other dims of those that both have.
    for request in requests:
        _check_held(request, covering, plan.source)
    pinned: list[PlanEntry] = []
    for request in requests:
        for entry, layers in _entries_of(request, covering, plan.source):
            part = replace(request, layers=layers)
            decision = _Pin(plan.source, registry).decide(_call(part, device, dtype), entry.choice, None)
            pinned.append(PlanEntry(part, decision, level_of(part.op, decision.provider, device.arch)))
    if covering:
        op, phase, layer = next(iter(covering))
        raise PlanError(f"{plan.source}: the entry for {_named(op, phase, [layer])} is of no use to this model")
    return DispatchPlan(model, device, dtype, tuple(pinned), f"pinned by {plan.source}")


def pinned_decision(plan: SavedPlan, call: Call, registry: Registry) -> Decision:
    """What a saved plan lays down for one class of calls; the first entry of its operator, phase and dims.

    Raises `PlanError` where it has none, or what it names cannot run.
    """
    for entry in plan.entries:
        if (entry.op, entry.phase) == (call.op, call.phase) and entry.dims in (None, dict(call.dims)):
            return _Pin(plan.source, registry).decide(call, entry.choice, None)
    hint = "`k3hal op plan --plan FILE` shows what it holds"
    raise PlanError(f"{plan.source}: no entry for {call.op} ({call.phase}) with these dims", hint=hint)


def _call(request: OpRequest, device: DeviceDescription, dtype: str) -> Call:
    return Call(request.op, device, dtype, request.phase, request.dims)


def _keys(entry: SavedEntry | OpRequest) -> list[Key]:
    return [(entry.op, entry.phase, layer) for layer in entry.layers or (None,)]


def _check_held(request: OpRequest, covering: dict[Key, SavedEntry], source: str) -> None:
    missing = [key for key in _keys(request) if key not in covering]
    if missing:
        hint = _near_miss(request, covering)
        raise PlanError(
            f"{source}: no entry for {_named(request.op, request.phase, [k[2] for k in missing])}", hint=hint
        )


def _entries_of(
    request: OpRequest, covering: dict[Key, SavedEntry], source: str
) -> list[tuple[SavedEntry, tuple[int, ...]]]:
    """Take the request's keys out of `covering`: the saved entries that hold them, each with the layers it holds."""
    groups: dict[int, tuple[SavedEntry, list[int]]] = {}
    for key in _keys(request):
        entry = covering.pop(key)
        _check_dims(entry, request, source)
        layers = groups.setdefault(id(entry), (entry, []))[1]
        layers += [] if key[2] is None else [key[2]]
    return [(entry, tuple(layers)) for entry, layers in groups.values()]


def _near_miss(request: OpRequest, covering: dict[Key, SavedEntry]) -> str:
    """What the plan has of the operator instead."""
    phases: dict[str, list[int | None]] = {}
    for op, phase, layer in covering:
        if op == request.op:
            phases.setdefault(phase, []).append(layer)
    found = [_named(request.op, phase, layers) for phase, layers in phases.items()]
    return f"it has {' and '.join(found)}" if found else ""


def _check_dims(entry: SavedEntry, request: OpRequest, source: str) -> None:
    if entry.dims is None or dict(entry.dims) == dict(request.dims):
        return
    name = next(n for n in {**entry.dims, **request.dims} if entry.dims.get(n) != request.dims.get(n))
    raise PlanError(
        f"{source}: the entry for {_named(request.op, request.phase, list(entry.layers))} was made for "
        f"{name}={entry.dims.get(name)}, this model has {name}={request.dims.get(name)}"
    )


def _named(op: str, phase: str, layers: list[int | None] | list[int]) -> str:
    numbers = [layer for layer in layers if layer is not None]
    return f"{op} ({phase}) in {layer_ranges(numbers)}" if numbers else f"{op} ({phase})"


def layer_ranges(layers: Iterable[int]) -> str:
    """Layer numbers in short: `layers 0-2, 4`; nothing for none."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    if not runs:
        return ""
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"layers {text}"


@dataclass(frozen=True, slots=True)
class _Pin:
    """Turns saved choices into decisions on this machine, or says why it cannot."""

    source: str
    registry: Registry

    def decide(self, call: Call, choice: Choice, weights: frozenset[str] | None) -> Decision:
        policy = f"pinned by {self.source}"
        if choice.tactic != DEFAULT and choice.provider in (REFERENCE, COMPOSED):
            self._fail(call, f"{choice.provider} has no tactics, the plan gives {choice.tactic!r}")
        yes = (Consideration(choice.provider, True, (policy,)),)
        if choice.provider == REFERENCE:
            return Decision(call, REFERENCE, policy, yes)
        if choice.provider == COMPOSED:
            return Decision(call, COMPOSED, policy, yes, None, self._parts(call, choice, weights))
        providers = {provider.id: provider for provider in self.registry.of(call.op)}
        if choice.provider not in providers:
            known = (*providers, REFERENCE)
            self._fail(call, f"there is no provider {choice.provider!r}", nearest(choice.provider, known))
        line = answer(providers[choice.provider], call, weights)
        if not line.accepted:
            self._fail(call, f"{choice.provider} cannot run here: {', '.join(line.reasons)}")
        return self._with_tactic(call, providers[choice.provider], choice.tactic, yes)

    def _with_tactic(self, call: Call, provider: Provider, tactic: str, yes: tuple[Consideration, ...]) -> Decision:
        policy = f"pinned by {self.source}"
        source = policy if provider.tactics is not None else ""
        if tactic != DEFAULT and tactic not in (tactics := offered(provider, call)):
            hint = nearest(tactic, tactics, always_list=True)
            self._fail(call, f"{provider.id} has no tactic {tactic!r} here", hint)
        return Decision(call, provider.id, policy, yes, provider, {}, tactic, source)

    def _parts(self, call: Call, choice: Choice, outer: frozenset[str] | None) -> dict[str, Decision]:
        operator = get_operator(call.op)
        if operator.lowering is None:
            self._fail(call, "it is not composed of finer operators")
        needed = operator.parts_of(call.dims)
        if set(needed) != set(choice.parts):
            self._fail(call, f"it is composed of {', '.join(needed)}; the plan gives {', '.join(choice.parts)}")
        own = own_weights(operator, needed, outer)
        try:
            return self._decided(part_calls(call, wide=True), choice, own)
        except PlanError:
            return self._decided(part_calls(call, wide=False), choice, own)

    def _decided(self, calls: Mapping[str, Call], choice: Choice, own: frozenset[str]) -> dict[str, Decision]:
        return {op: self.decide(part, choice.parts[op], own) for op, part in calls.items()}

    def _fail(self, call: Call, why: str, hint: str = "") -> NoReturn:
        raise PlanError(f"{self.source}: {call.op} ({call.phase}) on {call.device.id}: {why}", hint=hint)


@dataclass(frozen=True, slots=True)
class Difference:
    """Layers of an operator in which two plans differ; None where a plan has no entry."""

    op: str
    phase: str
    layers: tuple[int, ...]
    left: Choice | None
    right: Choice | None

    def __str__(self) -> str:
        return (
            f"{_named(self.op, self.phase, list(self.layers))}: {self.left or 'nothing'} -> {self.right or 'nothing'}"
        )


def compare_plans(left: SavedPlan, right: SavedPlan) -> tuple[Difference, ...]:
    """Where two plans run different things, in the left plan's order; empty when they run the same."""
    ours, theirs = ({key: e.choice for e in plan.entries for key in _keys(e)} for plan in (left, right))
    groups: dict[tuple[str, str, str, str], tuple[list[int], Choice | None, Choice | None]] = {}
    for op, phase, layer in {**ours, **theirs}:
        a, b = ours.get((op, phase, layer)), theirs.get((op, phase, layer))
        if a != b:
            layers = groups.setdefault((op, phase, str(a), str(b)), ([], a, b))[0]
            layers += [] if layer is None else [layer]
    return tuple(Difference(op, ph, tuple(ls), a, b) for (op, ph, _, _), (ls, a, b) in groups.items())
