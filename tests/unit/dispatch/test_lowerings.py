"""Every lowering in the tree is its operator's reference, made of references."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3hal.debug.golden import golden
from k3hal.debug.judge import judge
from k3hal.dispatch.operator import Operator, Sample
from k3hal.dispatch.registry import get_operator, operator_names


def _cases() -> list[Any]:
    return [
        pytest.param(operator, sample, id=f"{operator.name}-{sample.name}-{sample.dtype}")
        for operator in map(get_operator, operator_names())
        if operator.lowering
        for sample in operator.samples()
        if "tiny" in sample.tags
    ]


def _produced(operator: Operator, fn: Callable[..., Any], args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a call returns and mutates, by the operator's output names."""
    returned = fn(**args)
    values = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(operator.outputs, (*values, *(args[name] for name in operator.mutates)), strict=True))


@pytest.mark.parametrize(("operator", "sample"), _cases())
def test_a_lowering_of_references_is_the_reference(operator: Operator, sample: Sample) -> None:
    parts = operator.parts_of(sample.dims)
    assert set(parts) <= set(operator.lowers_to)
    assert operator.lowering is not None
    composed = operator.lowering({name: get_operator(name).reference for name in parts})
    args = sample.make(torch.Generator().manual_seed(11))
    got = _produced(operator, composed, copy.deepcopy(args))
    for numbers in judge(operator, args, got, golden(operator, args)):
        assert numbers.status == "Pass", numbers


def test_lowerings_end() -> None:
    """No operator is, over any number of steps, a part of itself."""
    for name in operator_names():
        seen: set[str] = set()
        todo = list(get_operator(name).lowers_to)
        while todo:
            part = todo.pop()
            if part not in seen:
                seen.add(part)
                todo += get_operator(part).lowers_to
        assert name not in seen
