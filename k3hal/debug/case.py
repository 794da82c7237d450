"""One call of an operator as data: its arguments and where they come from."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.call import Call, DimValue, Phase
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.operator import Operator, Sample

TO_TIME, TOO_LARGE = "bench", "device"
"""Tags of samples that are only made on request: those there are for timing, and those too large for a CPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call of operator `op`: CPU tensors and plain values by argument name, as they are before the call.

    Weight arguments are in the operator's own layout, not a provider's. Nobody changes `args`: what runs, runs on
    copies. `origin` says where a recorded call comes from (layer, step, provider, versions); `recorded` holds the
    outputs the recorded provider gave, by output name.
    """

    op: str
    name: str
    dtype: str
    args: Mapping[str, Any]
    phase: Phase = "any"
    dims: Mapping[str, DimValue] = field(default_factory=dict)
    seed: int | None = None
    tags: frozenset[str] = frozenset()
    origin: Mapping[str, Any] = field(default_factory=dict)
    recorded: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}-{self.dtype}" + (f"-seed{self.seed}" if self.seed else "")

    @property
    def nbytes(self) -> int:
        """Bytes of all argument tensors, those that share memory counted each."""
        return sum(value.nbytes for value in self.args.values() if isinstance(value, Tensor))

    def call(self, device: DeviceDescription) -> Call:
        """The class of calls this one belongs to, as selection sees it."""
        return Call(self.op, device, self.dtype, self.phase, self.dims)

    def with_args(self, suffix: str, **changes: Any) -> Case:
        """A case that differs in some arguments; recorded outputs no longer belong to it."""
        return replace(self, name=f"{self.name}.{suffix}", args={**self.args, **changes}, recorded={})


def sample_case(operator: Operator, sample: Sample, seed: int = 0) -> Case:
    """The case a sample makes from a seed: one (name, seed) is one set of values everywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{operator.name}/{sample.name}/{seed}".encode()))
    args = sample.make(generator)
    return Case(operator.name, sample.name, sample.dtype, args, sample.phase, sample.dims, seed, sample.tags)


def samples_of(
    operator: Operator, *, names: Collection[str] = (), tags: Collection[str] = (), dtypes: Collection[str] = ()
) -> Iterator[Sample]:
    """The operator's samples of these names, with any of these tags, of these dtypes; nothing given is everything.

    Samples too large for a CPU are left out unless named or their tag is asked for, those for timing unless `bench` is.
    """
    for sample in operator.samples():
        wanted = sample.name in names if names else bool(sample.tags & set(tags)) if tags else True
        reserved = next((tag for tag in (TO_TIME, TOO_LARGE) if tag in sample.tags), None)
        asked = reserved is None or sample.name in names or reserved in tags
        if wanted and asked and (not dtypes or sample.dtype in dtypes):
            yield sample


def sample_cases(operator: Operator, *, seed: int = 0, **filters: Collection[str]) -> Iterator[Case]:
    """The cases of `samples_of`, each made when it is asked for."""
    return (sample_case(operator, sample, seed) for sample in samples_of(operator, **filters))
