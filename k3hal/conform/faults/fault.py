"""A seeded fault: a wrong variant of a right provider of one operator, and the bug of the real world it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.target import Target
from k3hal.dispatch.ops._kda import in_fp32
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator

Arguments = dict[str, Any]
_RECURRENCES = ("kda_chunk", "kda_recurrent")
"""Parts whose result stays in fp32 within the coarse operator."""


@dataclass(slots=True)
class Right:
    """The right function that a fault is a variant of, called by keyword. `memory` is one mutant's own, kept between
    its calls; `calls` counts those."""

    fn: Callable[..., Any]
    memory: dict[Any, Any] = field(default_factory=dict)
    calls: int = 0

    def __call__(self, args: Mapping[str, Any], **changes: Any) -> Any:
        return self.fn(**{**args, **changes})


Mutant = Callable[[Right, Arguments], Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault called `name` in operator `op`. `bug` says in a line what an engineer would have done wrong.

    `mutant` gets the right function and a call's arguments, in the operator's own layout. `first` names the sample
    (`name` or `name:dtype`), or the invariant, that is expected to notice it; it is tried first, never alone.
    """

    name: str
    op: str
    bug: str
    mutant: Mutant
    first: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}.{self.name}"

    def planted(self, target: Target) -> Target:
        """The mutant in the place of a right target; its memory begins empty."""
        right = Right(_with_own_weights(target))

        def mutant(**args: Any) -> Any:
            right.calls += 1
            return self.mutant(right, args)

        return replace(target, id=f"{target.id}+{self.name}", fn=mutant, prepare=None)


def _with_own_weights(target: Target) -> Callable[..., Any]:
    """The target's function for weights in the operator's layout, laid out anew at each call."""
    prepare = target.prepare
    if prepare is None:
        return target.fn
    weights = get_operator(target.op).weights
    return lambda **args: target.fn(**{**args, **prepare(**{name: args[name] for name in weights})})


def base_of(op: str) -> Target:
    """What faults of an operator are planted in: its portable CPU provider, else its reference."""
    portable = [p for p in default_registry().of(op) if p.backend == "cpu" and _portable(p)]
    return Target.of(portable[-1]) if portable else Target.reference(get_operator(op))


def _portable(provider: Provider) -> bool:
    """Whether it runs on any CPU and takes every call."""
    return provider.supports is None and not provider.needs.dtypes


class Catalogue:
    """The faults of one family of operators, collected by decorating the mutants."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def fault(self, *ops: str, first: str = "") -> Callable[[Mutant], Mutant]:
        """The decorated mutant is a fault of each of these operators; its name and its docstring are the fault's."""

        def add(mutant: Mutant) -> Mutant:
            for op in ops:
                self.add(getattr(mutant, "__name__", ""), op, " ".join((mutant.__doc__ or "").split()), mutant, first)
            return mutant

        return add

    def add(self, name: str, op: str, bug: str, mutant: Mutant, first: str = "") -> None:
        """A fault by its parts. Raises `ValueError` for a second one of that name."""
        if any((name, op) == (known.name, known.op) for known in self.faults):
            raise ValueError(f"two faults of {op} are called {name}")
        self.faults.append(Fault(name, op, bug.rstrip("."), mutant, first))

    def within(self, coarse: str, parts: Iterable[Fault], but: tuple[str, ...] = ()) -> None:
        """Faults of finer operators as ones of the coarse operator that is made of them."""
        for one in parts:
            if one.name not in but:
                self.add(f"{one.op}_{one.name}", coarse, one.bug, _lowered(coarse, one), one.first)


def clean_composition(coarse: str) -> Mutant:
    """The coarse operator from references of its parts: what faults of parts are planted in."""
    return _lowered(coarse, None)


def _lowered(coarse: str, fault: Fault | None) -> Mutant:
    operator = get_operator(coarse)
    assert operator.lowering is not None
    lowering = operator.lowering

    def mutant(right: Right, args: Arguments) -> Any:
        parts = {name: right.memory.setdefault(name, _by_position(name, fault)) for name in operator.lowers_to}
        return lowering(parts)(**args)

    return mutant


def _by_position(op: str, fault: Fault | None) -> Callable[..., Any]:
    """A finer operator's reference, with the fault if it is its own, called by position as a composition does."""
    operator = get_operator(op)
    if fault is None or op != fault.op:
        return in_fp32(operator.reference) if op in _RECURRENCES else operator.reference
    planted = fault.planted(Target.reference(operator))
    defaults = operator.parameters_with_defaults

    def by_position(*args: Any) -> Any:
        return planted.fn(**{**defaults, **dict(zip(operator.parameters, args, strict=False))})

    return in_fp32(by_position) if op in _RECURRENCES else by_position


@contextmanager
def swapped(function: Callable[..., Any], **names: Any) -> Iterator[None]:
    """While active, `function` finds these in place of what its module calls so."""
    space = function.__globals__
    before = {name: space[name] for name in names}
    space.update(names)
    try:
        yield
    finally:
        space.update(before)


def reference_with(op: str, args: Mapping[str, Any], **names: Any) -> Any:
    """An operator's reference run on a call with other helpers than its own."""
    reference = get_operator(op).reference
    with swapped(reference, **names):
        return reference(**args)


def live_rows_of(args: Mapping[str, Any]) -> Tensor:
    """Bool [T]: the packed rows of sequences that have a slot."""
    total = next(args[name].shape[0] for name in ("x", "q", "qkv") if name in args)
    live = torch.zeros(total, dtype=torch.bool)
    bounds = args["cu_seqlens"].tolist() if "cu_seqlens" in args else list(range(total + 1))
    for n, slot in enumerate(args["slots"].tolist()):
        live[bounds[n] : bounds[n + 1]] = slot != 0
    return live
