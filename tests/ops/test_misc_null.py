"""The null backend: every operator has a provider whose results have the reference's shapes and dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.dispatch.operator import Sample
from k3hal.dispatch.registry import default_registry, get_operator, operator_names


def _null(op: str) -> Any:
    found = [p.fn for p in default_registry().of(op) if p.backend == "null"]
    assert len(found) == 1, op
    return found[0]


def _cases() -> list[Any]:
    return [
        pytest.param(name, sample, id=f"{name}-{sample.name}-{sample.dtype}")
        for name in operator_names()
        for sample in get_operator(name).samples()
        if "tiny" in sample.tags
    ]


def _outputs(returned: Any) -> list[tuple[torch.Size, torch.dtype]]:
    values = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    return [(value.shape, value.dtype) for value in values]


def _bytes(arguments: dict[str, Any]) -> dict[str, list[int]]:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return {name: value.contiguous().view(torch.uint8).flatten().tolist() for name, value in tensors.items()}


@pytest.mark.parametrize(("name", "sample"), _cases())
def test_shapes_are_the_references(name: str, sample: Sample) -> None:
    arguments = sample.make(torch.Generator().manual_seed(0))
    expected = _outputs(get_operator(name).reference(**copy.deepcopy(arguments)))
    before = _bytes(arguments)
    assert _outputs(_null(name)(**arguments)) == expected
    assert _bytes(arguments) == before


def test_null_is_chosen_only_by_name() -> None:
    assert not default_registry().backends["null"].auto
    assert all(_null(name) for name in operator_names())
