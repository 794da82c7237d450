"""Takes a live call of a bound operator apart into a case: its arguments before, and its outputs after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.compact import compact
from k3hal.debug.golden import named_outputs
from k3hal.debug.memory import GuardedCopy
from k3hal.dispatch.observe import Place
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.select import Decision


class Weights:
    """Finds another layout of weights by the one a call brings: as they were read, or as another provider wants them.

    By identity, since one place may be called with many weights. A provider may fold several arguments into one and
    leave None for the rest, so all weights of a call are looked up together. Both layouts live as long as this.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[Place, int], tuple[Any, Mapping[str, Any]]] = {}

    def remember(self, place: Place, prepared: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Calls at `place` that bring `prepared` are to get `wanted`."""
        for value in prepared.values():
            if value is not None:
                self._groups[place, id(value)] = (value, wanted)

    def of(self, place: Place, operator: Operator, named: Mapping[str, Any]) -> dict[str, Any]:
        """The wanted weight arguments of a call; empty where none were laid out at load."""
        for name in operator.weights:
            if found := self._groups.get((place, id(named[name]))):
                return {weight: found[1][weight] for weight in operator.weights if weight in found[1]}
        return {}


class Site:
    """One bound function: the place in the plan, and the decision (of the place's operator or of a part of it).

    Made once, when the function is bound: what is looked up here is not looked up in every call.
    """

    def __init__(self, place: Place, decision: Decision, weights: Weights) -> None:
        self.place, self.decision, self._weights = place, decision, weights
        self.op = decision.call.op
        self.operator: Operator = get_operator(self.op)
        self._defaults = self.operator.parameters_with_defaults
        order = list(self._defaults)
        self._rewritten = [(order.index(name), name) for name in _READ_AND_WRITTEN.get(self.op, ())]
        index = _index_of(self.op) if self._rewritten else None
        self._index = None if index is None else (order.index(index), index)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, defaults filled in."""
        return {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **kwargs}

    def mutated_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copies of what a call is about to overwrite and also reads, as little as possible."""

        def given(at: int, name: str) -> Tensor | None:
            return args[at] if at < len(args) else kwargs.get(name)

        index = None if self._index is None else given(*self._index)
        values = {name: given(at, name) for at, name in self._rewritten}
        return {
            name: value.clone() if index is None else torch.index_select(value, 0, index)
            for name, value in values.items()
            if value is not None
        }

    def case(self, named: Mapping[str, Any], origin: Mapping[str, Any], before: Mapping[str, Tensor]) -> Case:
        """The call as a case, copied to the CPU; caches are cut to what the call uses.

        `before` is what `mutated_rows` gave ahead of the call, where the call has already run; else empty.
        """
        cut = compact(self.op, {**named, **self._weights.of(self.place, self.operator, named)})
        args = GuardedCopy(cut).args
        for name, rows in before.items():
            args[name][... if self._index is None else args[self._index[1]].long()] = rows.to("cpu")
        call, place = self.decision.call, self.place
        where = {
            "layer": place.layer,
            "phase": place.phase,
            "provider": self.decision.provider,
            "backend": self.decision.backend,
            "part_of": place.op if place.op != self.op else "",
            "device": call.device.id,
            "arch": call.device.arch,
            "packages": _versions(self.decision),
        }
        name = "recorded" if place.layer is None else f"layer{place.layer}"
        return Case(self.op, name, call.dtype, args, call.phase, call.dims, origin={**where, **origin})

    def outputs(self, returned: Any, named: Mapping[str, Any]) -> dict[str, Tensor]:
        """The outputs of a call that has run, copied to the CPU, caches cut as `case` cuts them."""
        cut = compact(self.op, named)
        outputs = named_outputs(self.operator, returned, cut)
        return {name: value.detach().to("cpu", copy=True) for name, value in outputs.items()}


_READ_AND_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "attn_res_mix": ("prefix",),
    "causal_conv1d": ("conv_state",),
    "copy_pages": ("arena",),
    "kda_chunk": ("state",),
    "kda_commit": ("conv_state", "state"),
    "kda_decode": ("conv_state", "state"),
    "kda_prefill": ("conv_state", "state"),
    "kda_recurrent": ("state",),
    "rms_norm": ("residual",),
}
"""Mutated arguments whose former contents matter. What is only overwritten is not here."""


def _index_of(op: str) -> str | None:
    """The argument that says which cache rows an operator rewrites; None where arguments are rewritten whole."""
    return {"copy_pages": "dst", "attn_res_mix": None, "rms_norm": None}.get(op, "slots")


def _versions(decision: Decision) -> dict[str, str]:
    wanted = {"torch", *(decision.chosen.needs.packages if decision.chosen else ())}
    have = decision.call.device.packages
    return {name: have[name] for name in sorted(wanted) if name in have}
