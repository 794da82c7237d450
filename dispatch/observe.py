"""Lets debugging see, and stand in for, what a dispatch plan binds. Without an observer nothing is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from k3hal.dispatch.call import Phase
    from k3hal.dispatch.select import Decision


@dataclass(frozen=True, slots=True)
class Place:
    """Where a function is bound: the plan entry's operator, layer (None outside the layers) and phase."""

    op: str
    layer: int | None
    phase: Phase


class Observer(Protocol):
    """Told of every function and weight as a plan is bound; what it returns is what the model calls."""

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function to bind instead of `fn`, which `decision` chose. The decision may be of a part of the place's
        composed operator; parts come before the whole."""
        ...

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        """The place's weight arguments, as read and as its provider wants them."""
        ...


_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Plans bound inside the `with` block are seen by `observer`; of several the last one is outermost."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observers() -> tuple[Observer, ...]:
    """Those in force now."""
    return tuple(_observers)
