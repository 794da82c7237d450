"""Dispatch plans: every decision of a model on a machine, bound to functions once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3hal.dispatch.beside import Beside
from k3hal.dispatch.call import Call, DimValue, Phase
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import PlanError
from k3hal.dispatch.evidence import level_of
from k3hal.dispatch.observe import Place, observers
from k3hal.dispatch.policy import warn_of_fallbacks
from k3hal.dispatch.select import Around, Decision, Selector


@dataclass(frozen=True, slots=True)
class OpRequest:
    """An operator a model needs in some layers: layers that share all static facts share one request.

    `layers` is empty for operators outside the layers (embedding, head, step metadata).
    """

    op: str
    layers: tuple[int, ...]
    phase: Phase = "any"
    dims: Mapping[str, DimValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One request with its decision, and the evidence level of what was chosen."""

    request: OpRequest
    decision: Decision
    level: str = "E0"


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """All decisions of one model on one machine.

    `policy` is the fallback policy they were made under, or the plan file that was pinned.
    """

    model: str
    device: DeviceDescription
    dtype: str
    entries: tuple[PlanEntry, ...]
    policy: str = "strict"

    def bind(self, beside: Beside | None = None) -> BoundOps:
        """The callables of every entry. Composed operators are built here, once; their parts may use `beside`."""
        return BoundOps(self, beside)


class BoundOps:
    """Looks up bound operators while a model is built; nothing here runs per call.

    The observers in force when it is made see what it binds (`dispatch/observe.py`), and nothing runs beside it.
    """

    def __init__(self, plan: DispatchPlan, beside: Beside | None = None) -> None:
        self._decisions: dict[tuple[str, int | None, Phase], Decision] = {}
        self._functions: dict[tuple[str, int | None, Phase], Callable[..., Any]] = {}
        self._observers = observers()
        for entry in plan.entries:
            function = entry.decision.function(beside=beside)
            for layer in entry.request.layers or (None,):
                key = (entry.request.op, layer, entry.request.phase)
                if key in self._decisions:
                    raise PlanError(f"two plan entries for {key[0]} in layer {layer}, phase {key[2]}")
                if self._observers:
                    function = entry.decision.function(self._around(Place(*key)))
                self._decisions[key], self._functions[key] = entry.decision, function

    def _around(self, place: Place) -> Around:
        def around(decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
            for observer in self._observers:
                fn = observer.bound(place, decision, fn)
            return fn

        return around

    def has(self, op: str, layer: int | None = None, phase: Phase = "any") -> bool:
        """Whether the plan has an operator for a layer."""
        return (op, layer, phase) in self._functions or (op, None, phase) in self._functions

    def fn(self, op: str, layer: int | None = None, phase: Phase = "any") -> Callable[..., Any]:
        """The function to call for an operator in a layer: the provider's own, with nothing around it."""
        return self._functions[self._key(op, layer, phase)]

    def prepare(self, op: str, layer: int | None = None, phase: Phase = "any", **weights: Any) -> Mapping[str, Any]:
        """The operator's weight arguments in the layout its chosen provider wants."""
        key = self._key(op, layer, phase)
        decision = self._decisions[key]
        prepared = decision.prepare(**weights)
        for observer in self._observers:
            observer.prepared(Place(*key), decision, weights, prepared)
        return prepared

    def _key(self, op: str, layer: int | None, phase: Phase) -> tuple[str, int | None, Phase]:
        keys: tuple[tuple[str, int | None, Phase], ...] = ((op, layer, phase), (op, None, phase))
        for key in keys:
            if key in self._functions:
                return key
        raise PlanError(f"the plan has no entry for {op} in layer {layer}, phase {phase}")


def make_plan(
    requests: Iterable[OpRequest], selector: Selector, *, model: str, device: DeviceDescription, dtype: str
) -> DispatchPlan:
    """Decide every request. Raises `DispatchError` as `Selector.decide` does.

    Under the `warn` policy, what runs the reference or is composed is logged, each such set once per process.
    """
    decided = ((r, selector.decide(Call(r.op, device, dtype, r.phase, r.dims))) for r in requests)
    entries = tuple(PlanEntry(r, d, level_of(r.op, d.provider, device.arch)) for r, d in decided)
    if selector.fallback == "warn":
        warn_of_fallbacks([entry.decision for entry in entries])
    return DispatchPlan(model, device, dtype, entries, selector.fallback)
