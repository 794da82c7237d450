"""The coarse KDA operators composed of CPU providers, on every sample of theirs that a CPU can hold."""

from __future__ import annotations

import copy

import pytest
import torch

from k3hal.debug.golden import golden
from k3hal.debug.judge import judge
from k3hal.dispatch import Call
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.select import Decision, Selector

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
    given = sample.make(torch.Generator().manual_seed(3))
    args = copy.deepcopy(given)
    args |= decision.prepare(**{name: args[name] for name in operator.weights})
    actual = {"out": decision.function()(**args), "conv_state": args["conv_state"], "state": args["state"]}
    for numbers in judge(operator, given, actual, golden(operator, given)):
        assert numbers.status == "Pass", numbers
