"""Every CPU provider against its operator's reference, on every sample it claims and a CPU can hold."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import pytest
import torch

from k3hal.debug.golden import golden
from k3hal.debug.judge import judge
from k3hal.dispatch.call import Call
from k3hal.dispatch.operator import Operator, Sample
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator, operator_names

CPU = probe("cpu")


def _cases() -> list[Any]:
    return [
        pytest.param(name, provider.id, sample, id=f"{name}-{provider.name}-{sample.name}-{sample.dtype}")
        for name in operator_names()
        for provider in default_registry().of(name)
        if provider.backend == "cpu"
        for sample in get_operator(name).samples()
        if "device" not in sample.tags and provider.answer(Call(name, CPU, sample.dtype, sample.phase, sample.dims))
    ]


def _run(operator: Operator, fn: Any, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Call `fn` and name everything it produced, returned tensors first."""
    returned = fn(**args)
    values = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    values = (*values, *(args[name] for name in operator.mutates))
    named = dict(zip(operator.outputs, values, strict=True))
    return {name: value for name, value in named.items() if value is not None}


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality under which NaN equals itself: samples poison what must not be read."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("name", "provider_id", "sample"), _cases())
def test_provider_matches_reference(name: str, provider_id: str, sample: Sample) -> None:
    operator = get_operator(name)
    provider = next(p for p in default_registry().of(name) if p.id == provider_id)
    args = sample.make(torch.Generator().manual_seed(zlib.crc32(sample.name.encode())))
    actual_args = copy.deepcopy(args)
    expected = golden(operator, args)
    if provider.prepare:
        actual_args |= provider.prepare(**{w: actual_args[w] for w in operator.weights})
    actual = _run(operator, provider.fn, actual_args)
    for numbers in judge(operator, args, actual, expected):
        assert numbers.status == "Pass", numbers
    for argument, before in args.items():
        if isinstance(before, torch.Tensor) and argument not in (*operator.mutates, *operator.weights):
            assert _same_bytes(before, actual_args[argument]), f"{argument} was modified"


def test_every_operator_has_samples_and_a_contract() -> None:
    for name in operator_names():
        operator = get_operator(name)
        assert operator.reference.__doc__, name
        assert len(list(operator.samples())) >= 2, name


def test_scratch_made_under_inference_mode_is_usable_outside() -> None:
    """A provider first run by the engine (inference mode) and then by a tool outside it keeps working."""
    operator = get_operator("mla_decode")
    provider = next(p for p in default_registry().of("mla_decode") if p.id == "cpu.batched")
    args = next(s for s in operator.samples() if s.dtype == "float32").make(torch.Generator().manual_seed(0))
    with torch.inference_mode():
        inside = provider.fn(**args)
    assert torch.equal(provider.fn(**args), inside)
