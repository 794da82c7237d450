"""The tolerance policy: dtype decides the caps, heads are judged alone, ties are settled and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3hal.debug.case import Case, sample_cases
from k3hal.debug.execute import execute
from k3hal.debug.floors import measure
from k3hal.debug.golden import golden
from k3hal.debug.judge import caps_in_force, judge, loosest_caps
from k3hal.debug.target import Target
from k3hal.debug.verdict import TensorNumbers
from k3hal.dispatch.ops.mx_quantize import mx_quantize
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.tolerance import CLASSES, compare, rounding, rounding_at_most

MakeCase = Callable[..., Case]


def _outputs(case: Case) -> dict[str, Tensor]:
    """What the reference gives, as a provider would."""
    operator = get_operator(case.op)
    found = execute(operator, Target.reference(operator), case.args).outputs
    return {name: value.clone() for name, value in found.items()}


def _numbers(case: Case, outputs: dict[str, Tensor]) -> dict[str, TensorNumbers]:
    operator = get_operator(case.op)
    return {n.name: n for n in judge(operator, case.args, outputs, golden(operator, case.args))}


@pytest.mark.parametrize(
    ("op", "sample", "output"),
    [
        ("rms_norm", "plain", "out"),
        ("linear", "rows", "out"),
        ("situ_and_mul", "tiny", "out"),
        ("kda_decode", "seven", "out"),
        ("kda_decode", "seven", "state"),
        ("kda_prefill", "around_tile", "state"),
    ],
)
def test_what_is_in_fp32_may_not_be_as_wrong_as_tf32(case_of: MakeCase, op: str, sample: str, output: str) -> None:
    case = case_of(op, sample, "float32")
    outputs = _outputs(case)
    assert _numbers(case, outputs)[output].status == "Pass"
    assert _numbers(case, outputs)[output].tolerance.startswith("fp32")
    outputs[output] = outputs[output] * (1 + 2.0**-11)
    assert _numbers(case, outputs)[output].status == "Fail"


@given(
    values=st.lists(st.floats(-1e30, 1e30).filter(lambda v: v == 0 or abs(v) > 1e-30), min_size=1, max_size=200),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_rounding_is_never_above_what_a_shape_allows(values: list[float], dtype: torch.dtype) -> None:
    exact = torch.tensor([values], dtype=torch.float64)
    for golden_of in (exact, exact.to(dtype)):
        got, most = rounding(golden_of, dtype), rounding_at_most(golden_of, dtype)
        assert all(getattr(got, name) <= getattr(most, name) * 1.000001 for name in ("tensor", "slice", "peak"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_rounded_results_may_lie_one_step_apart_where_they_are_largest_and_not_two(dtype: torch.dtype) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[3, 5] = 40.0  # its neighbours are `step` away, which is more of an RMS than the cap on the peak
    caps = replace(CLASSES["matmul"], peak=1e-6).beyond_rounding(rounding(values, dtype))
    step = torch.finfo(dtype).eps * 32
    for steps, passes in ((1, True), (2, False)):
        moved = values.clone()
        moved[3, 5] += steps * step
        assert compare(moved, values).passes(replace(caps, tensor=1.0, slice=1.0)) is passes


@pytest.mark.parametrize("op", ["kda_decode", "kda_prefill", "mla_decode", "moe_experts", "situ_and_mul", "embed"])
def test_caps_in_force_are_within_the_loosest_for_their_shapes(op: str) -> None:
    operator = get_operator(op)
    for case in sample_cases(operator, tags=("tiny", "edge")):
        expected = golden(operator, case.args)
        for name in expected:
            _, caps = caps_in_force(operator, case.args, name, expected)
            most = loosest_caps(operator, case.args, name, expected)
            numbers = [(getattr(caps, n), getattr(most, n)) for n in ("floor", "tensor", "slice", "peak")]
            assert caps.exact is most.exact and all(a <= b for a, b in numbers), (case.id, name, numbers)


def test_a_state_kept_in_bf16_fails_where_tokens_come_one_by_one(case_of: MakeCase) -> None:
    case = case_of("kda_decode", "seven", "bfloat16")
    outputs = _outputs(case)
    outputs["state"] = outputs["state"].bfloat16().float()
    assert "above its cap" in _numbers(case, outputs)["state"].problem


def test_the_golden_of_a_narrow_output_is_not_rounded(case_of: MakeCase) -> None:
    case = case_of("kda_prefill", "around_tile", "bfloat16")
    exact = golden(get_operator(case.op), case.args)
    assert (exact["out"].dtype, exact.dtypes["out"]) == (torch.float64, torch.bfloat16)
    assert not torch.equal(exact["out"], exact["out"].bfloat16().double())
    error = _numbers(case, _outputs(case))["out"].tensor
    assert 0.001 < error < 0.0025


def test_one_head_of_one_sequence_is_seen(case_of: MakeCase) -> None:
    """2 % in one head of one row is 1.2 % of the row and 0.44 % of the whole, which both caps allow."""
    case = case_of("kda_decode", "seven", "bfloat16")
    outputs = _outputs(case)
    head = case.args["norm_weight"].shape[0]
    outputs["out"][3, head : 2 * head] *= 1.02
    numbers = _numbers(case, outputs)["out"]
    assert numbers.tensor < CLASSES["matmul"].tensor
    assert numbers.problem.startswith("slice")


def _routed(case: Case, change: Callable[[Tensor, Tensor], None]) -> dict[str, TensorNumbers]:
    outputs = _outputs(case)
    change(outputs["weights"], outputs["ids"])
    return _numbers(case, outputs)


def _reverse(weights: Tensor, ids: Tensor) -> None:
    weights.copy_(weights.flip(1).clone())
    ids.copy_(ids.flip(1).clone())


def _swap_ids_only(weights: Tensor, ids: Tensor) -> None:
    ids[:, :2] = ids[:, :2].flip(1).clone()


def _other_expert(weights: Tensor, ids: Tensor) -> None:
    ids[0, -1] = next(e for e in range(16) if e not in ids[0].tolist())


def _twice(weights: Tensor, ids: Tensor) -> None:
    ids[0, -1] = ids[0, 0]


def _out_of_range(weights: Tensor, ids: Tensor) -> None:
    ids[0, 0] = 1 << 20


def test_the_order_of_chosen_experts_is_free(case_of: MakeCase) -> None:
    assert {n.status for n in _routed(case_of("moe_route", "one", "float32"), _reverse).values()} == {"Pass"}


@pytest.mark.parametrize("change", [_swap_ids_only, _other_expert, _twice, _out_of_range])
def test_a_wrong_choice_of_experts_fails(case_of: MakeCase, change: Callable[[Tensor, Tensor], None]) -> None:
    assert "Fail" in {n.status for n in _routed(case_of("moe_route", "one", "float32"), change).values()}


def test_equal_scores_go_to_the_lower_id(case_of: MakeCase) -> None:
    def highest(weights: Tensor, ids: Tensor) -> None:
        ids.copy_(torch.arange(15, 15 - ids.shape[1], -1))

    assert _routed(case_of("moe_route", "all_equal", "float32"), highest)["ids"].status == "Fail"


def test_either_of_two_experts_within_2_ulp_may_be_taken(case_of: MakeCase) -> None:
    case = case_of("moe_route", "plain", "float32")
    logits, bias = torch.tensor([[1.0, 0.5, 0.0, -2.0]]), torch.zeros(4)
    logits[0, 2] = torch.nextafter(logits[0, 1], torch.tensor(-1.0))
    args = {"logits": logits, "bias": bias, "top_k": 2, "renormalize": True, "scale": 1.0}
    near = case.with_args("near", **args)
    outputs = _outputs(near)
    assert outputs["ids"].tolist() == [[0, 1]]
    outputs["ids"][0, 1] = 2
    assert {n.status for n in _numbers(near, outputs).values()} == {"Pass"}
    outputs["ids"][0, 1] = 3
    assert _numbers(near, outputs)["ids"].status == "Fail"


def test_a_draw_on_a_boundary_may_go_either_way(case_of: MakeCase) -> None:
    case = case_of("sample", "plain", "float32")
    flat = {**case.args, "logits": torch.zeros(8, 4), "uniform": torch.full((8,), 0.5, dtype=torch.float64)}
    case = case.with_args("boundary", **flat)
    outputs = _outputs(case)
    assert outputs["out"].tolist() == [2] * 8
    outputs["out"][3] = 1
    assert _numbers(case, outputs)["out"].status == "Pass"
    outputs["out"][3] = 0
    assert _numbers(case, outputs)["out"].status == "Fail"


def test_one_half_in_ten_thousand_may_round_the_other_way(case_of: MakeCase) -> None:
    x = torch.randint(-28, 29, (320, 64), generator=torch.Generator().manual_seed(0)) / 4
    case = case_of("mx_quantize", "tiny", "float32").with_args("halves", x=x)
    packed, scales = mx_quantize(x)
    halves = (packed & 7 == 2).nonzero()  # magnitude 1, into which 1.25 under scale 1 rounds

    def status(count: int, **other: Any) -> str:
        codes = packed.clone()
        picked = [
            i for i in halves.tolist() if abs(float(x[i[0], 2 * i[1]])) == 1.25 and scales[i[0], i[1] // 16] == 127
        ]
        for row, byte in picked[:count]:
            codes[row, byte] += 1
        assert len(picked) > count
        return _numbers(case, {"packed": codes, "scales": scales, **other})["packed"].status

    assert (status(0), status(2), status(3)) == ("Pass", "Pass", "Fail")
    wrong = packed.clone()
    wrong[0, 0] ^= 8
    assert _numbers(case, {"packed": wrong, "scales": scales})["packed"].status == "Fail"


def test_floors_are_above_what_right_providers_measure() -> None:
    """One rounding to bf16 is 0.0017 of values of all mantissas alike, and up to a tenth more of others."""
    measured = measure(tags=("edge",))
    for name, row in measured.items():
        caps = CLASSES[name]
        assert 0 < row["tensor"].value <= 1.1 * caps.floor, (name, row["tensor"])
        assert row["slice"].value <= caps.slice, (name, row["slice"])
        assert 0 < caps.measured[0] <= 1.1 * caps.floor < caps.tensor, name
        assert caps.measured[1] <= caps.slice and caps.where, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_equal_bits_are_no_error_and_one_other_bit_is(dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (40, 64), generator=torch.Generator().manual_seed(3)).to(dtype)
    if dtype.is_floating_point:
        values[3, 5] = torch.nan
    assert compare(values.clone(), values) == compare(values[:, ::2].contiguous(), values[:, ::2])
    assert compare(values.clone(), values).peak == 0.0
    assert compare(values.float(), values.double()).peak == 0.0
    other = values.clone()
    other.view(torch.uint8)[7, 0] ^= 1
    assert compare(other, values).peak > 0.0
    if dtype.is_floating_point:
        other = values.clone()
        other[3, 5] = 1.0
        assert not torch.isfinite(torch.tensor(compare(other, values).peak))
