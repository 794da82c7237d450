"""Operators: a signature, a reference that defines it, and all that is needed to judge a provider of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from k3hal.dispatch.call import DimValue, Phase

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Outputs: TypeAlias = "Mapping[str, Tensor]"


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work a call must do: floating-point operations, and bytes each moved once."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One input set of an operator. `make` builds the keyword arguments on CPU from a seeded generator.

    Tags: `tiny` (runs everywhere, also under an interpreter), `edge` (tile edges and awkward counts), `adversarial`
    (extreme values, collisions, empty sequences), `k3` (a full-size per-rank shape), `device` (too large for CPU), with
    it `bench` (there to be timed, never part of a conformance run);
    besides these `must` (finds what no other sample does, so it is always of the must-pass subset).
    """

    name: str
    make: Callable[[torch.Generator], dict[str, Any]]
    dims: Mapping[str, DimValue] = field(default_factory=dict)
    dtype: str = "bfloat16"
    phase: Phase = "any"
    tags: frozenset[str] = frozenset({"tiny"})


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. `reference` is its definition; its docstring is the layout contract.

    `outputs` names what a call produces, in order: returned tensors first (`out`, or one name per returned tensor),
    then the mutated arguments, each with its tolerance class (`dispatch/tolerance.py`). `weights` are the arguments
    fixed at load, which a provider may lay out anew. `lowering` builds the operator's function from the functions of
    the finer operators in `lowers_to`, given by name (and `beside`, see `dispatch/beside.py`); `parts` narrows these to
    what a call of given dims really needs, each with dims of its own (without it: all of them, each with the coarse
    call's dims). A part's weight arguments that carry the coarse operator's names are laid out by the part's provider.
    `wide_parts` are those between which nothing need be rounded to the activation dtype: where there are providers of
    all of them for float32, that is what they are called with.

    `heads` maps an output whose last axis holds all heads to the argument whose last axis is as wide as one head, so
    that each is judged by itself. `settle_ties` takes (arguments, outputs, golden outputs), all by name, and returns
    the outputs with every difference undone that the contract leaves open, as between two experts of nearly the same
    score; it is only asked about outputs of the golden's shapes and the contract's dtypes.

    Returned tensors are new and contiguous wherever the reference's are.
    """

    reference: Callable[..., Any]
    family: str
    outputs: Mapping[str, str]
    samples: Callable[[], Iterator[Sample]]
    cost: Callable[..., Cost]
    mutates: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    invariants: tuple[str, ...] = ()
    lowers_to: tuple[str, ...] = ()
    lowering: Callable[[Mapping[str, Callable[..., Any]]], Callable[..., Any]] | None = None
    parts: Callable[[Mapping[str, DimValue]], Mapping[str, Mapping[str, DimValue]]] | None = None
    wide_parts: tuple[str, ...] = ()
    heads: Mapping[str, str] = field(default_factory=dict)
    settle_ties: Callable[[Mapping[str, Any], Outputs, Outputs], Outputs] | None = None

    def parts_of(self, dims: Mapping[str, DimValue]) -> Mapping[str, Mapping[str, DimValue]]:
        """The finer operators that a call of these dims is composed of, each with its dims."""
        return self.parts(dims) if self.parts else dict.fromkeys(self.lowers_to, dims)

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """Argument names, in order."""
        return tuple(inspect.signature(self.reference).parameters)

    @property
    def parameters_with_defaults(self) -> dict[str, Any]:
        """Argument names, in order, with their defaults; a provider's must be the same."""
        return with_defaults(self.reference)

    @property
    def summary(self) -> str:
        return (self.reference.__doc__ or "").strip().splitlines()[0]


def with_defaults(fn: Callable[..., Any]) -> dict[str, Any]:
    """A function's argument names, in order, with their defaults (`inspect.Parameter.empty` where there is none)."""
    return {name: parameter.default for name, parameter in inspect.signature(fn).parameters.items()}
