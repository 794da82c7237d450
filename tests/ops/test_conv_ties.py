"""Samples whose convolution rounds to the same bf16 values in any arithmetic of fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.dispatch.ops._conv_ties import off_ties
from k3hal.dispatch.ops.kda_prefill import OPERATOR
from k3hal.dispatch.sampling_inputs import int32


def from_ties(qkv: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """How far each result of the convolution is from a tie, in bf16 steps (0 to a half)."""
    window = torch.cat((history, qkv)).double()
    taps = [window[j : j + qkv.shape[0]] * weight[:, j].double() for j in range(weight.shape[1])]
    significand = torch.frexp(silu(torch.stack(taps).sum(0)))[0].abs() * 256
    return (significand - significand.floor() - 0.5).abs()


def inputs(rows: int, channels: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(5)
    return {
        "qkv": torch.randn(rows, channels, generator=gen).bfloat16(),
        "conv_weight": torch.randn(channels, 4, generator=gen),
        "conv_state": torch.randn(3, 3, channels, generator=gen).bfloat16(),
        "slots": int32((2, 0, 1)),
        "cu_seqlens": int32((0, rows - 40, rows - 20, rows)),
        "has_state": torch.tensor((True, True, False)),
    }


def test_no_result_stays_near_a_tie_and_few_inputs_move() -> None:
    args = inputs(300, 200)
    before = args["qkv"].clone()
    off_ties(**args)
    near = 20 / 65536
    first = from_ties(args["qkv"][:260], args["conv_weight"], args["conv_state"][2])
    last = from_ties(args["qkv"][280:], args["conv_weight"], torch.zeros_like(args["conv_state"][1]))
    assert min(first.min(), last.min()) > near
    assert from_ties(before[:260], args["conv_weight"], args["conv_state"][2]).min() < near
    assert torch.equal(args["qkv"][260:280], before[260:280])  # Of the null slot.
    moved = args["qkv"] != before
    assert 0 < int(moved.sum()) < moved.numel() / 500
    assert ((args["qkv"].float() / before.float())[moved] - 1).abs().max() < 0.05


def test_a_result_that_no_input_can_move_is_refused() -> None:
    low, high = 1.0, 2.0
    while high - low > 1e-12:  # SiLU of it lies in the middle of 1 and the next bf16 value.
        middle = (low + high) / 2
        low, high = (middle, high) if silu(torch.tensor(middle).double()) < 1 + 2.0**-8 else (low, middle)
    args = {
        "qkv": torch.ones(1, 1).bfloat16(),
        "conv_weight": torch.tensor([[0.0, 0.0, low, 0.0]]),
        "conv_state": torch.ones(2, 3, 1).bfloat16(),
        "slots": int32((1,)),
        "cu_seqlens": int32((0, 1)),
        "has_state": torch.tensor((True,)),
    }
    with pytest.raises(RuntimeError, match="stays near a tie"):
        off_ties(**args)


@pytest.mark.parametrize("name", ["around_chunk", "null_slot", "padded_strided"])
def test_samples_of_kda_prefill_have_left_them(name: str) -> None:
    (sample,) = (s for s in OPERATOR.samples() if s.name == name and s.dtype == "bfloat16")
    args = sample.make(torch.Generator().manual_seed(0))
    again = args["qkv"].clone()
    off_ties(**{key: args[key] for key in inputs(60, 1)} | {"qkv": again})
    live = args["qkv"].isfinite()
    assert torch.equal(again[live], args["qkv"][live])
