"""Definitions, and what settles their ties, make tensors where their arguments are: cases too large for a host need it.

A default device that holds nothing stands for another than the arguments': what is made there cannot meet them.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from k3hal.debug.case import samples_of
from k3hal.debug.golden import golden
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.registry import get_operator, operator_names

TOO_LARGE = {"k3", "device", "bench"}
SETTLED = [name for name in operator_names() if get_operator(name).settle_ties]


def _small(name: str) -> list[Sample]:
    return [sample for sample in samples_of(get_operator(name)) if not sample.tags & TOO_LARGE]


def _generator(sample: Sample) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(sample.name.encode()))


def _off(value: torch.Tensor, by: float, dtype: torch.dtype) -> torch.Tensor:
    return (value * (1 + by)).to(dtype) if value.is_floating_point() else value + 1


@pytest.mark.parametrize("name", operator_names())
def test_a_definition_computes_where_its_arguments_are(name: str) -> None:
    operator, ran = get_operator(name), 0
    for sample in _small(name)[:8]:
        args = sample.make(_generator(sample))
        with torch.device("meta"):
            returned = operator.reference(**args)
        made = returned if isinstance(returned, tuple) else (returned,)
        assert {value.device.type for value in made if isinstance(value, torch.Tensor)} <= {"cpu"}
        ran += 1
    assert ran


@pytest.mark.parametrize("name", SETTLED)
def test_ties_are_settled_where_the_arguments_are(name: str) -> None:
    """Of results that are wrong everywhere, as nothing explains, and by little, as something may."""
    operator, changed = get_operator(name), 0
    for sample in _small(name):
        args = sample.make(_generator(sample))
        wanted = golden(operator, dict(args))
        for wrong in (1, 2.0**-8):
            outputs = {n: _off(t, wrong, torch.bfloat16 if n == "out" else t.dtype) for n, t in wanted.items()}
            with torch.device("meta"):
                settled = operator.settle_ties(args, outputs, wanted)  # pyright: ignore[reportOptionalCall]
            assert {value.device.type for value in settled.values()} == {"cpu"}
            changed += 1
    assert changed
