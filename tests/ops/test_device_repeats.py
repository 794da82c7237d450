"""On a device: a kernel that takes its inputs through a ring gives equal bits however often it runs.

What a ring lets through too early is rare: it took 40 runs of 16,384 rows to see three wrong ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug.case import sample_cases
from k3hal.debug.target import Target
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator

RUNS = 100
OPS = ("attn_res_mix", "kda_decode", "kda_prefill", "mla_decode", "moe_experts_mxfp4")


def _moved(values: Any) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in values.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bytes: slots that no sequence holds are full of NaN, which equals nothing."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def test_equal_bits_are_told_from_others() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.device
@pytest.mark.parametrize("op", OPS)
def test_many_runs_give_equal_bits(op: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device, operator, judged = probe("cuda"), get_operator(op), 0
    for case in sample_cases(operator, tags=("bench",)):
        for provider in default_registry().of(op):
            if provider.backend != "nvidia" or not provider.answer(case.call(device)):
                continue
            given, target = _moved(case.args), Target.of(provider)
            if target.prepare:
                given |= target.prepare(**{name: given[name] for name in operator.weights})
            first: list[Tensor] = []
            for _ in range(RUNS):
                args = given | {name: given[name].clone() for name in operator.mutates if given[name] is not None}
                returned = target.fn(**args)
                tensors = [t for t in (returned if isinstance(returned, tuple) else (returned,)) if t is not None]
                got = [*tensors, *(args[name] for name in operator.mutates if args[name] is not None)]
                first = first or got
                assert len(got) == len(first)
                assert all(map(same_bits, first, got)), (case.id, provider.id)
            judged += 1
    assert judged, f"no provider of the nvidia backend took a bench case of {op}"
