"""The operator calls of a model while it runs, each with its least work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.capture import Weights
from k3hal.dispatch.observe import Place
from k3hal.dispatch.operator import Cost
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.select import Decision


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator by the model. `label` tells weights apart; `run` repeats it on the same tensors, if those
    were to be kept. Of a composed operator the parts are calls too, `part_of` it.
    """

    op: str
    part_of: str
    label: str
    provider: str
    run: Callable[[], Any] | None
    cost: Cost


class CallRecorder:
    """An observer of the operators that the model calls, and of what composed ones are made of.

    It must be in force while the model is built (`dispatch/observe.py`). Of weights laid out anew it keeps shapes, not
    values.
    """

    on_request = True

    def __init__(self) -> None:
        self._weights = Weights()
        self._calls: list[OpCall] | None = None
        self._kept = False

    @contextmanager
    def recording(self, *, kept: bool) -> Iterator[list[OpCall]]:
        """The calls made within the block, in order; their tensors live as long as they do if they are `kept`.

        Counting their work waits for the device.
        """
        self._calls, self._kept = (calls := []), kept
        try:
            yield calls
        finally:
            self._calls = None

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        op = decision.call.op
        operator, part_of = get_operator(op), "" if op == place.op else place.op

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._calls is not None:
                named = {**operator.parameters_with_defaults, **dict(zip(operator.parameters, args, strict=False))}
                named |= kwargs
                known = {**named, **self._weights.of(place, operator, named)}
                cost = operator.cost(**known)
                run = _repeat(fn, args, kwargs) if self._kept else None
                label = f"{part_of}: {_label(op, known)}" if part_of else _label(op, known)
                self._calls.append(OpCall(op, part_of, label, decision.provider, run, cost))
            return fn(*args, **kwargs)

        return watched

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        shapes = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
        self._weights.remember(place, prepared, shapes)


def _repeat(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: fn(*args, **kwargs)


def _label(op: str, named: Mapping[str, Any]) -> str:
    """`linear 6288x7168`: products of other shapes are other work."""
    weight = named.get("weight")
    if "linear" not in op or not isinstance(weight, torch.Tensor):
        return op
    return f"{op} {'x'.join(map(str, weight.shape))}"
