"""Lets debugging see, and stand in for, what a dispatch plan binds. Without an observer nothing is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

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


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass over `N` sequences, the `num_decodes` that decode one token each first, and how to repeat it.

    `run` advances the caches from where they are and gives the hidden states [T, D] after the final norm. Each call
    does the same to the same caches, for as long as the sequences hold their slots and pages. `slots`, `context_lens`
    (tokens cached before), `new_lens` int32 [N] on the host. `states` u8 [slots, bytes] are the state slots, the same
    object in every step of an engine: of the sequences with cached tokens the pass reads its slot, and it rewrites all
    their slots. `kv` [pages, page tokens, width] of every MLA layer; the pass writes a row of each at every `kv_rows`
    int64 [T] (page * page tokens + offset, negative for none). `moved`: pages were copied since the last step.
    """

    run: Callable[[], Tensor]
    num_decodes: int
    slots: np.ndarray
    context_lens: np.ndarray
    new_lens: np.ndarray
    states: Tensor
    kv: tuple[Tensor, ...]
    kv_rows: Tensor
    moved: bool


@runtime_checkable
class StepObserver(Protocol):
    """An observer that is also told of the steps of engines built while it is in force. It may repeat a step, within
    `repeating`, if it leaves the caches as it found them."""

    def stepping(self, step: Step) -> None:
        """The step is about to run."""
        ...

    def stepped(self, step: Step, hidden: Tensor) -> None:
        """The step has run and gave `hidden`; not called for one that failed."""
        ...


_observers: list[Observer] = []
_repeating: ContextVar[bool] = ContextVar("_repeating", default=False)


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


def must_see_every_call() -> bool:
    """Whether an observer in force has to see each call as it is made, so that none may be part of a captured graph.

    One with a true `on_request` has not: it looks at calls that it makes happen itself.
    """
    return any(not getattr(observer, "on_request", False) for observer in _observers)


def step_observers() -> tuple[StepObserver, ...]:
    """Those in force now that want to know of steps."""
    return tuple(observer for observer in _observers if isinstance(observer, StepObserver))


@contextmanager
def repeating() -> Iterator[None]:
    """What runs in the block, in this thread, is a repetition: calls there count for nobody but whoever repeats."""
    token = _repeating.set(True)
    try:
        yield
    finally:
        _repeating.reset(token)


def is_repetition() -> bool:
    """Whether this thread is repeating a step."""
    return _repeating.get()
