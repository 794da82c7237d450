"""How AITER rounds activations to MXFP8, restated in torch, and that no call of its `fused_moe` is `moe_experts_a8w4`.

A test of the last kind that fails says that the operator, the class or the library's rules have come closer: then there
can be an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug.case import sample_case, samples_of
from k3hal.dispatch.ops._experts import sum_of_experts
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded
from k3hal.dispatch.ops.moe_experts_a8w4 import moe_experts_a8w4
from k3hal.dispatch.ops.moe_experts_mxfp4 import moe_experts_mxfp4
from k3hal.dispatch.ops.mx_dequantize import GROUP, mx_dequantize
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.tolerance import CLASSES, Comparison, compare

Rounding = Callable[[Tensor], Tensor]
MANTISSA, BIAS = 23, 127
"""Of fp32, as whose bits the library sees a group's largest element."""
SAMPLE = "k3_tp8_20_experts"


def kernel_rounded(x: Tensor) -> Tensor:
    """By `fused_dynamic_mx_quant_moe_sort`, and Opus's first product: scales 2^ceil(log2(amax / 448))."""
    bits = (_largest(x).clamp_min(1e-10) * (1 / 448)).view(torch.int32)
    fraction = bits & ((1 << MANTISSA) - 1)
    return _scaled(x, (bits >> MANTISSA) + (fraction != 0).int())


def flydsl_rounded(x: Tensor) -> Tensor:
    """By FlyDSL's first product where its name ends in `_fp8`: scales 2^(floor(log2 amax) - 8), from 1.5 times a power
    of two on those of the next."""
    half = 1 << (MANTISSA - 1)
    return _scaled(x, (((_largest(x).view(torch.int32) + half) >> MANTISSA) - 8).clamp_min(0))


def stored(then: Rounding) -> Rounding:
    """`then` of what a kernel before it left in bf16."""
    return lambda x: then(x.to(torch.bfloat16).float())


def _largest(x: Tensor) -> Tensor:
    return x.float().unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True)


def _scaled(x: Tensor, biased: Tensor) -> Tensor:
    scale = torch.ldexp(torch.ones(biased.shape), biased - BIAS)
    codes = (x.float().unflatten(-1, (-1, GROUP)) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def _made(args: dict[str, Any], of_x: Rounding, of_activation: Rounding) -> Tensor:
    """The experts with these roundings."""
    hidden = args["x"].shape[1]
    assert args["w2"].shape[2] * 2 != hidden, "the two factors are told apart by their width"

    def expert(e: int) -> tuple[Tensor, Tensor]:
        first, second = (mx_dequantize(args[w][e], args[w + "_scale"][e], torch.float32) for w in ("w13", "w2"))
        return first, second

    rest = (args["ids"], args["weights"], expert, args["activation"], args["beta"], args["linear_beta"])
    return sum_of_experts(args["x"], *rest, lambda v: of_x(v) if v.shape[1] == hidden else of_activation(v))


def _off(args: dict[str, Any], of_x: Rounding, of_activation: Rounding) -> Comparison:
    """The same beside the operator's golden."""
    return compare(_made(args, of_x, of_activation), moe_experts_a8w4(**{**args, "x": args["x"].float()}))


@pytest.fixture(scope="module")
def args() -> dict[str, Any]:
    """Kimi K3's widths on a rank of eight."""
    operator = get_operator("moe_experts_a8w4")
    return dict(sample_case(operator, next(s for s in samples_of(operator) if s.name == SAMPLE)).args)


@pytest.mark.parametrize(
    ("largest", "operators", "kernels", "flydsls"),
    [
        (1.0, 2.0**-8, 2.0**-8, 2.0**-8),
        (1.5, 2.0**-8, 2.0**-8, 2.0**-7),
        (1.75, 2.0**-8, 2.0**-8, 2.0**-7),
        (1.9, 2.0**-8, 2.0**-7, 2.0**-7),
    ],
)
def test_the_scale_of_a_group(largest: float, operators: float, kernels: float, flydsls: float) -> None:
    """Seen in a group's smallest code: half of it is rounded to zero, and 0.6 of it up to all of it."""
    for rounded, scale in ((mxfp8_rounded, operators), (kernel_rounded, kernels), (flydsl_rounded, flydsls)):
        smallest = scale * 2.0**-9
        group = torch.tensor([largest, 0.5 * smallest, 0.6 * smallest, *[0.0] * (GROUP - 3)])
        assert rounded(group)[1:3].tolist() == [0.0, smallest]


def test_a_groups_largest_elements_are_cut_off_by_the_operator_alone() -> None:
    group = torch.tensor([2 - 2.0**-7, 1.85, 1.75, 0.3, *[0.0] * (GROUP - 4)])
    assert mxfp8_rounded(group)[:4].tolist() == [1.75, 1.75, 1.75, 0.3125]
    for rounded in (kernel_rounded, flydsl_rounded):
        assert rounded(group)[:4].tolist() == [2.0, 1.875, 1.75, 0.3125]


def test_x_can_be_rounded_before_the_library_does() -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 256).unsqueeze(1)
    ours = mxfp8_rounded(x.to(torch.bfloat16))
    assert torch.equal(ours, ours.to(torch.bfloat16).float())
    assert torch.equal(kernel_rounded(ours), ours)
    assert not torch.equal(kernel_rounded(x.to(torch.bfloat16)), ours)


@pytest.mark.parametrize(
    ("of_x", "of_activation", "measured"),
    [
        pytest.param(kernel_rounded, stored(kernel_rounded), 0.039, id="untuned"),
        pytest.param(kernel_rounded, kernel_rounded, 0.039, id="opus"),
        pytest.param(kernel_rounded, flydsl_rounded, 0.039, id="flydsl"),
        pytest.param(mxfp8_rounded, stored(kernel_rounded), 0.024, id="untuned_after_ours"),
        pytest.param(mxfp8_rounded, kernel_rounded, 0.021, id="opus_after_ours"),
        pytest.param(mxfp8_rounded, flydsl_rounded, 0.021, id="flydsl_after_ours"),
        pytest.param(mxfp8_rounded, stored(mxfp8_rounded), 0.014, id="ours_of_bf16"),
    ],
)
def test_no_way_of_the_library_is_the_operator(
    args: dict[str, Any], of_x: Rounding, of_activation: Rounding, measured: float
) -> None:
    off = _off(args, of_x, of_activation)
    assert not off.problem and off.tensor == pytest.approx(measured, abs=6e-4)
    assert off.tensor > CLASSES["matmul"].tensor


def test_it_is_another_rounding_and_not_a_worse_one(args: dict[str, Any]) -> None:
    unrounded = moe_experts_mxfp4(**{**args, "x": args["x"].float()})
    ways = ((mxfp8_rounded, mxfp8_rounded), (kernel_rounded, stored(kernel_rounded)), (kernel_rounded, flydsl_rounded))
    off = [compare(_made(args, *way), unrounded).tensor for way in ways]
    assert off == pytest.approx([0.053, 0.047, 0.047], abs=6e-4)


def test_the_operators_own_rounding_is_within_the_class(args: dict[str, Any]) -> None:
    assert _off(args, mxfp8_rounded, mxfp8_rounded).passes(CLASSES["matmul"])
