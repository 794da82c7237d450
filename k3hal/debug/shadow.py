"""Runs references beside a live model's providers, on copies, and reports where they part (`K3HAL_SHADOW`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from k3hal.debug import shadow_figures
from k3hal.debug.capture import Site, Weights
from k3hal.debug.golden import golden
from k3hal.debug.judge import judge
from k3hal.dispatch.observe import Place, is_repetition
from k3hal.dispatch.registry import operator_names
from k3hal.dispatch.select import Decision
from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError

logger = logging.getLogger("k3hal.debug.shadow")
VARIABLE = "K3HAL_SHADOW"


@dataclass(frozen=True, slots=True)
class ShadowSpec:
    """Which operators are shadowed, and every how many calls of each in each layer."""

    ops: str
    every: int


def parse_shadow(text: str, source: str = VARIABLE) -> ShadowSpec:
    """Parse `GLOB[:rate]`; the rate is a fraction like `0.01`, or `1/100`; default 1. Raises `UsageError`."""
    ops, _, rate = text.partition(":")
    if not any(fnmatchcase(op, ops) for op in operator_names()):
        raise UsageError(f"{source}: no operator matches {ops!r}", hint=nearest(ops, operator_names()))
    above, _, below = (rate or "1").partition("/")
    try:
        share = float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{source}: rate {rate!r}", hint="a fraction above 0, at most 1, like 0.01 or 1/100")
    return ShadowSpec(ops, max(1, round(1 / share)))


class Shadow:
    """The observer behind `K3HAL_SHADOW`. The answer is the provider's, whatever is found."""

    def __init__(self, spec: ShadowSpec) -> None:
        self.spec = spec
        self._weights = Weights()

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        if not fnmatchcase(decision.call.op, self.spec.ops):
            return fn
        site, every, calls = Site(place, decision, self._weights), self.spec.every, 0

        def shadowed(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if is_repetition():
                return fn(*args, **kwargs)
            calls += 1
            if calls % every:
                return fn(*args, **kwargs)
            named = site.named(args, kwargs)
            case = site.case(named, {}, {})
            returned = fn(*args, **kwargs)
            self._compare(site, case.args, site.outputs(returned, named))
            return returned

        return shadowed

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        self._weights.remember(place, prepared, given)

    def _compare(self, site: Site, args: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        numbers = judge(site.operator, args, outputs, golden(site.operator, args))
        shadow_figures.compared[site.op] += 1
        bad = [f"{n.name}: {n.problem}" for n in numbers if n.status == "Fail"]
        if bad:
            shadow_figures.diverged[site.op] += 1
            where = "" if site.place.layer is None else f" in layer {site.place.layer}"
            logger.warning(
                "%s (%s)%s, %s: diverges from the reference: %s",
                site.op, site.decision.provider, where, site.place.phase, "; ".join(bad),
            )  # fmt: skip
