"""Copies of a call's arguments that calls are made on in turn, so that no cache holds what the next one needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Literal

from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.device_timing import CapturedCalls
from k3hal.debug.golden import named_outputs
from k3hal.debug.judge import judge
from k3hal.debug.memory import GuardedCopy, same_bytes
from k3hal.debug.target import Target
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.runtime import DeviceRuntime

Cache = Literal["cold", "warm"]
ROTATED_BYTES = 3 << 27
"""Moved between two calls on one copy: more than the last-level cache of any accelerator."""
MOST_COPIES = 1024
_SHARE = 0.4
"""Of the device's memory, for copies and what is made from them."""


class RotatedCalls:
    """A target's call on `count` copies of a case's arguments, its weights laid out anew for each.

    `cold` takes as many copies as are needed to move `ROTATED_BYTES` by the operator's own count, and as memory holds;
    at least two where it holds them. `warm` is one copy.
    """

    def __init__(self, case: Case, target: Target, runtime: DeviceRuntime, cache: Cache, moved: float) -> None:
        self.operator: Operator = get_operator(case.op)
        self.target, self.case, self.moved = target, case, moved
        self.arguments: list[dict[str, Any]] = [_laid_out(self.operator, case, target)]
        wanted = 1 if cache == "warm" else 1 + ceil(ROTATED_BYTES / max(moved, 1.0))
        # Twice: a copy's own, and as much again for its results and for what laying weights out takes meanwhile.
        fits = 1 + int(_SHARE * runtime.memory().total / max(2 * case.nbytes, 1))
        for _ in range(1, min(wanted, MOST_COPIES, fits)):
            self.arguments.append(_laid_out(self.operator, case, target))
        self.calls: list[Callable[[], Any]] = [self._call(args) for args in self.arguments]

    @property
    def rotated_bytes(self) -> float:
        """Bytes that the calls move between two on one copy."""
        return self.moved * (len(self.calls) - 1)

    def _call(self, args: Mapping[str, Any]) -> Callable[[], Any]:
        fn = self.target.fn
        return lambda: fn(**args)

    def stale(self, runtime: DeviceRuntime, graph: CapturedCalls) -> str:
        """What a replay gives for other values than the graph was captured with, if it is not what a call gives.

        The first and the last copy get the case's states again and their floating inputs halved. A graph that holds a
        host's copy of a value, or the place of a result that is gone, shows here. Empty if all is well.
        """
        checked = dict.fromkeys((0, len(self.calls) - 1))
        for index in checked:
            self._renew(self.arguments[index])
        fresh = _laid_out(self.operator, self.case, self.target)
        self._renew(fresh)
        last = [self.target.fn(**fresh) for _ in range(graph.rounds)][-1]
        expected = named_outputs(self.operator, last, fresh)
        runtime.synchronize()
        graph.replay()
        runtime.synchronize()
        for index in checked:
            returned = graph.returned[index - len(self.calls)]
            outputs = named_outputs(self.operator, returned, self.arguments[index])
            for name, wanted in expected.items():
                if not self._agree(name, outputs[name], wanted):
                    return f"a replayed graph gives another {name} for new inputs than the call itself"
        return ""

    def _renew(self, args: Mapping[str, Any]) -> None:
        """The case's states, and its other floating inputs halved."""
        for name, value in self.case.args.items():
            if not isinstance(value, Tensor) or name in self.operator.weights:
                continue
            if name in self.operator.mutates:
                args[name].copy_(value)
            elif value.is_floating_point() and value.element_size() > 1:
                args[name].copy_(value * 0.5)

    def _agree(self, name: str, actual: Tensor, wanted: Tensor) -> bool:
        if same_bytes(actual, wanted):
            return True
        if self.target.deterministic:
            return False
        actual, wanted = actual.cpu(), wanted.cpu()
        numbers = judge(self.operator, self.case.args, {name: actual}, {name: wanted})
        return all(number.status == "Pass" for number in numbers)


def _laid_out(operator: Operator, case: Case, target: Target) -> dict[str, Any]:
    """A copy of the case's arguments on the target's device, weights as the target wants them."""
    args = GuardedCopy(case.args, target.device).args
    if target.prepare:
        args |= target.prepare(**{name: args[name] for name in operator.weights})
    return args
