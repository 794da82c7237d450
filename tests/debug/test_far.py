"""Slots and pages beyond 2^31 and 2^32: right providers find them, offsets in 32 bits are caught, no memory goes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3hal.debug.case import Case, sample_cases
from k3hal.debug.invariants import check_invariant, invariants_of
from k3hal.debug.target import Target
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator, operator_names

FAR = [name for name in operator_names() if "far" in invariants_of(get_operator(name))]
MakeCase = Callable[..., Case]


@pytest.mark.parametrize("op", FAR)
def test_cpu_providers_reach_every_row(op: str) -> None:
    operator, cpu, checked = get_operator(op), probe("cpu"), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in sample_cases(operator, tags=("tiny",)):
        claimed = [p for p in default_registry().of(op) if p.backend == "cpu" and p.answer(case.call(cpu))]
        for target in (Target.reference(operator), *map(Target.of, claimed)):
            verdict = check_invariant("far", case, target)
            if verdict:
                assert verdict.ok, verdict
                checked += 1
    assert checked
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10, "a huge cache was filled"


def _wrapped(op: str, argument: str, cache: str, bits: int, unit: int | None) -> Target:
    """The reference with offsets into a cache kept in `bits` bits, in units of bytes or of elements."""
    reference = get_operator(op).reference

    def fn(**args: Any) -> Any:
        rows, index = args[cache], args[argument].long()
        span = 2**bits * (unit or rows.element_size()) // (rows.stride(0) * rows.element_size())
        page = rows.shape[1] if argument == "rows" else 1
        valid = (index >= 0) & (index // page < rows.shape[0])
        wrapped = index // page % span * page + index % page
        return reference(**{**args, argument: torch.where(valid, wrapped, index).to(args[argument].dtype)})

    return replace(Target.reference(get_operator(op)), id="wrapped", fn=fn)


@pytest.mark.parametrize(
    ("op", "sample", "dtype", "argument", "cache"),
    [
        ("kda_decode", "one", "bfloat16", "slots", "state"),
        ("kda_recurrent", "seven", "float32", "slots", "state"),
        ("causal_conv1d", "three_tokens", "bfloat16", "slots", "conv_state"),
        ("mla_decode", "three", "bfloat16", "page_table", "kv_cache"),
        ("mla_cache_insert", "fp8", "bfloat16", "rows", "kv_cache"),
        ("copy_pages", "chain", "bfloat16", "dst", "arena"),
    ],
)
@pytest.mark.parametrize(("bits", "unit"), [(31, 1), (32, 1), (31, None)])
def test_an_offset_that_wraps_fails(
    case_of: MakeCase, op: str, sample: str, dtype: str, argument: str, cache: str, bits: int, unit: int | None
) -> None:
    case = case_of(op, sample, dtype)
    verdict = check_invariant("far", case, _wrapped(op, argument, cache, bits, unit))
    assert verdict is not None
    assert verdict.status == "Fail", verdict


def test_what_has_no_slot_gives_nothing_to_try(case_of: MakeCase) -> None:
    case = case_of("kda_decode", "one_null", "bfloat16")
    assert check_invariant("far", case, Target.reference(get_operator("kda_decode"))) is None
