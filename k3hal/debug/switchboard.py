"""A live model each of whose operators can be switched, place by place, between two sets of providers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from k3hal.debug.capture import Site, Weights
from k3hal.debug.case import Case
from k3hal.debug.target import Target
from k3hal.dispatch.observe import Place
from k3hal.dispatch.select import Decision, Selector, offered

Captured = list[tuple[Case, dict[str, Tensor]]]


@dataclass(slots=True)
class Line:
    """One switched place: its site, the function bound there (`bad`), the other one, and the bound parts by name.

    `tactic` is set while another tactic stands for what was bound.
    """

    site: Site
    bad: Callable[..., Any]
    good: Callable[..., Any]
    good_provider: str
    parts: Mapping[str, Callable[..., Any]]
    tactic: str = ""

    @property
    def provider(self) -> str:
        """The bad provider, with its tactic while that is not what was bound."""
        return self.site.decision.provider + (f":{self.tactic}" if self.tactic else "")

    @property
    def target(self) -> Target:
        """What is bound here, to run cases with; weights laid out as its decision says."""
        decision = self.site.decision
        return replace(Target.decided(decision, decision.call.device.torch_device), id=self.provider, fn=self.bad)


def tactics_of(decision: Decision) -> Iterator[tuple[str, Decision]]:
    """The decision with each tactic of its provider, `default` included, by the tactic's name; with those of its
    parts, by `PART=NAME`. Nothing for what has no tactics."""
    if decision.chosen and decision.chosen.tactics is not None:
        for name in offered(decision.chosen, decision.call):
            yield name, replace(decision, tactic=name)
    for op, part in decision.parts.items():
        for name, changed in tactics_of(part):
            yield f"{op}={name}", replace(decision, parts={**decision.parts, op: changed})


class Switchboard:
    """The observer of a model built with the bad providers. `good` decides what runs wherever `bad` says no.

    `bad` are the places that run what was bound; everything else runs the good function. `stage` is set by whoever
    drives the model; under `only_stage` a bad place is bad in that stage alone. `capture` names a place whose bad
    calls are kept.
    """

    def __init__(self, good: Selector) -> None:
        self._good = good
        self.lines: dict[Place, Line] = {}
        self.bad: Collection[Place] = ()
        self.stage = ""
        self.only_stage: str | None = None
        self.capture: Place | None = None
        self.captured: Captured = []
        self._weights = Weights()
        self._good_weights = Weights()
        self._decisions: dict[Place, Decision] = {}
        self._parts: dict[Place, dict[str, Callable[..., Any]]] = {}

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        if decision.call.op != place.op:
            self._parts.setdefault(place, {})[decision.call.op] = fn
            return fn
        chosen = self._decisions[place] = self._good.decide(decision.call)
        line = Line(Site(place, decision, self._weights), fn, chosen.function(), chosen.provider, {})
        line.parts = {op: decision.fitted(op, part) for op, part in self._parts.get(place, {}).items()}
        self.lines[place] = line

        def switched(*args: Any, **kwargs: Any) -> Any:
            if place in self.bad and self.only_stage in (None, self.stage):
                return self._captured(line, args, kwargs) if place == self.capture else line.bad(*args, **kwargs)
            named = line.site.named(args, kwargs)
            return line.good(**{**named, **self._good_weights.of(place, line.site.operator, named)})

        return switched

    @contextmanager
    def tactic(self, places: Collection[Place], name: str) -> Iterator[list[Place]]:
        """While active, the bad function of those places that offer the tactic `name` is that tactic's.

        Gives these places. A tactic shares its provider's layout of weights, so they stay as they are.
        """
        before = {}
        for place in places:
            line = self.lines[place]
            if (decision := dict(tactics_of(line.site.decision)).get(name)) is not None:
                before[place] = (line.bad, line.parts)
                line.bad, line.tactic = decision.function(), name
                line.parts = {op: decision.fitted(op, part.function()) for op, part in decision.parts.items()}
        try:
            yield list(before)
        finally:
            for place, (bad, parts) in before.items():
                line = self.lines[place]
                line.bad, line.parts, line.tactic = bad, parts, ""

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        self._weights.remember(place, prepared, given)
        self._good_weights.remember(place, prepared, self._decisions[place].prepare(**given))

    def _captured(self, line: Line, args: Any, kwargs: Any) -> Any:
        named = line.site.named(args, kwargs)
        case = line.site.case(named, {"stage": self.stage}, {})
        returned = line.bad(*args, **kwargs)
        self.captured.append((case, line.site.outputs(returned, named)))
        return returned
