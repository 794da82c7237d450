"""Invariants hold for what is right and fail for the faults they are there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug.batching import BATCHING, select, unit_outputs, units
from k3hal.debug.case import Case
from k3hal.debug.execute import execute
from k3hal.debug.invariants import INVARIANTS, check_invariant, invariants_of
from k3hal.debug.target import Target
from k3hal.dispatch.ops.kda_chunk import kda_chunk
from k3hal.dispatch.ops.mla_decode import mla_decode
from k3hal.dispatch.registry import get_operator, operator_names

MakeCase = Callable[..., Case]

HOLDS = [
    ("kda_chunk", "empty_sequences", ("split", "restore", "batch", "pad")),
    ("causal_conv1d", "around_tile", ("split", "restore", "batch", "pad")),
    ("kda_prefill", "null_slot", ("batch", "pad")),
    ("kda_decode", "null_slots", ("batch", "pad", "decode")),
    ("kda_verify", "null_slots", ("batch", "pad")),
    ("mla_prefill", "page_edges", ("split", "batch", "pad", "decode")),
    ("mla_decode", "empty_rows", ("batch", "pad", "decode")),
    ("moe_experts_mxfp4", "negative", ("batch", "pad")),
    ("mla_cache_insert", "padding", ("pad",)),
    ("attn_res_mix", "", ("batch",)),
]


@pytest.mark.parametrize(("op", "name", "invariants"), HOLDS)
def test_references_hold_them(case_of: MakeCase, op: str, name: str, invariants: tuple[str, ...]) -> None:
    name = name or next(s.name for s in get_operator(op).samples() if "tiny" in s.tags)
    case = case_of(op, name)
    for invariant in invariants:
        verdict = check_invariant(invariant, case, Target.reference(get_operator(op)))
        assert verdict is not None, invariant
        assert verdict.ok, verdict


def _mutant(op: str, fn: Callable[..., Any]) -> Target:
    return replace(Target.reference(get_operator(op)), id="mutant", fn=fn)


def _forgets_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *rest: Tensor) -> Tensor:
    slots, cu_seqlens, has_state = rest
    return kda_chunk(q, k, v, g, beta, state, slots, cu_seqlens, torch.zeros_like(has_state))


def _slot_of_the_batch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *rest: Tensor
) -> Tensor:
    slots, cu_seqlens, has_state = rest
    in_order = torch.arange(1, len(slots) + 1, dtype=slots.dtype)
    return kda_chunk(q, k, v, g, beta, state, in_order, cu_seqlens, has_state)


def _one_row_short(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int
) -> Tensor:
    return mla_decode(q, kv_cache, page_table, (seq_lens - 1).clamp_min(1) * (seq_lens > 0), scale, kv_lora)


def _positional(fn: Callable[..., Any], op: str) -> Callable[..., Any]:
    names = get_operator(op).parameters
    return lambda **args: fn(*(args[name] for name in names))


@pytest.mark.parametrize(
    ("op", "name", "fault", "invariant"),
    [
        ("kda_chunk", "around_tile", _forgets_state, "split"),
        ("kda_chunk", "around_tile", _slot_of_the_batch, "restore"),
        ("mla_decode", "page_edges", _one_row_short, "decode"),
    ],
)
def test_a_fault_breaks_its_invariant(
    case_of: MakeCase, op: str, name: str, fault: Callable[..., Any], invariant: str
) -> None:
    verdict = check_invariant(invariant, case_of(op, name), _mutant(op, _positional(fault, op)))
    assert verdict is not None
    assert verdict.status == "Fail"


def test_every_promise_is_known_by_name() -> None:
    promised = {name for op in operator_names() for name in invariants_of(get_operator(op))}
    assert promised == {"split", "restore", "batch", "pad", "decode", "far"}
    assert promised < set(INVARIANTS)


@pytest.mark.parametrize("op", sorted(BATCHING))
def test_selected_units_give_their_part_of_the_outputs(case_of: MakeCase, op: str) -> None:
    operator = get_operator(op)
    names = [s.name for s in operator.samples() if "device" not in s.tags and "k3" not in s.tags]
    case = next(c for c in (case_of(op, name) for name in names) if units(c) > 2)
    target = Target.reference(operator)
    whole, part = execute(operator, target, case.args).outputs, select(case, [2, 0])
    alone = execute(operator, target, part.args).outputs
    got, want = unit_outputs(part, alone, [0, 1]), unit_outputs(case, whole, [2, 0])
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], equal_nan=True)
