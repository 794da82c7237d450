"""Faults planted in a live model by an observer of its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3hal.dispatch.observe import Place
from k3hal.dispatch.select import Decision


@dataclass(frozen=True)
class Fault:
    """Replaces what one operator returns in one layer (any if None), also within compositions."""

    op: str
    layer: int | None
    change: Callable[[Any], Any]

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        if decision.call.op != self.op or self.layer not in (None, place.layer):
            return fn
        return lambda *args, **kwargs: self.change(fn(*args, **kwargs))

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        pass
