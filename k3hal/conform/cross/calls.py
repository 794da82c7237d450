"""Kimi K3's calls of an operator with arguments that have no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from k3hal.dispatch.operator import Operator, Sample

FULL_SIZE = ("k3", "bench")
MOST_DECODED = 256
"""Rows of a batch that decoding may have."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A sample whose tensors are on `meta`: shapes, strides and dtypes are the sample's, values there are none."""

    sample: Sample
    args: Mapping[str, Any]

    @property
    def decodes(self) -> bool:
        """Whether a step of decoding may make this call."""
        first = next(value for value in self.args.values() if isinstance(value, torch.Tensor))
        few = first.shape[0] <= MOST_DECODED
        return self.sample.phase in ("decode", "verify") or (self.sample.phase == "any" and few)


def full_size_calls(operator: Operator) -> Iterator[Shaped]:
    """The operator's samples of the model's sizes in bfloat16, or in what there is."""
    samples = [s for s in operator.samples() if s.tags.intersection(FULL_SIZE)]
    narrow = [s for s in samples if s.dtype == "bfloat16"] or samples
    for sample in narrow:
        args = _without_memory(sample)
        if args is not None:
            yield Shaped(sample, args)


def _without_memory(sample: Sample) -> Mapping[str, Any] | None:
    """The arguments on `meta`; None of a sample for measuring that cannot be made without its memory."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            args = sample.make(torch.Generator())
    except (DataDependentOutputException, DynamicOutputShapeException):  # its inputs follow from drawn values
        if "bench" in sample.tags:
            return None
        args = sample.make(torch.Generator().manual_seed(0))
    return {name: _on_meta(value) for name, value in args.items()}


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
