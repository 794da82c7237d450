"""The coarse KDA operators composed of CPU providers, on every sample of theirs that a CPU can hold."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from k3hal.dispatch import Call
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.select import Decision, Selector
from k3hal.dispatch.tolerance import CLASSES, compare

from .kda_layer import CPU

COARSE = ("kda_prefill", "kda_decode")
CASES = [
    pytest.param(op, sample, id=f"{op}-{sample.name}-{sample.dtype}")
    for op in COARSE
    for sample in get_operator(op).samples()
    if "device" not in sample.tags
]


def _composed(op: str, dtype: str) -> Decision:
    registry = default_registry()
    return Selector(registry, parse_overrides(f"{op}=composed", "test", registry)).decide(Call(op, CPU, dtype))


@pytest.mark.parametrize("op", COARSE)
def test_every_part_has_a_cpu_provider(op: str) -> None:
    decision = _composed(op, "bfloat16")
    assert decision.composed and not decision.reference
    assert {part.backend for part in decision.parts.values()} == {"cpu"}


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_composition_matches_the_reference(op: str, sample: Sample) -> None:
    operator, decision = get_operator(op), _composed(op, sample.dtype)
    golden_args = sample.make(torch.Generator().manual_seed(3))
    args = copy.deepcopy(golden_args)
    args |= decision.prepare(**{name: args[name] for name in operator.weights})
    golden = [operator.reference(**golden_args), golden_args["conv_state"], golden_args["state"]]
    actual = [decision.function()(**args), args["conv_state"], args["state"]]
    for (output, tolerance), got, expected in zip(operator.outputs.items(), actual, golden, strict=True):
        assert got.dtype == expected.dtype
        result, cap = compare(got, expected), CLASSES[tolerance]
        # Between two bf16 operators the recurrence's output is rounded, which the reference does not do.
        peak = 2 * cap.peak if sample.dtype == "bfloat16" else cap.peak
        assert result.passes(replace(cap, peak=peak)), f"{output}: {result}"
