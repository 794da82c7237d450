"""MXFP4: every byte under every scale, rounding, and round trips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.dispatch.ops.mx_dequantize import VALUES, mx_dequantize, random_codes
from k3hal.dispatch.ops.mx_quantize import mx_quantize
from k3hal.dispatch.registry import default_registry

Fn = Callable[..., Any]


def _cpu(op: str) -> Fn:
    return next(p.fn for p in default_registry().of(op) if p.backend == "cpu")


DEQUANTIZE = pytest.mark.parametrize("dequantize", [mx_dequantize, _cpu("mx_dequantize")], ids=["reference", "cpu"])
QUANTIZE = pytest.mark.parametrize("quantize", [mx_quantize, _cpu("mx_quantize")], ids=["reference", "cpu"])


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@DEQUANTIZE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale(dequantize: Fn, dtype: torch.dtype) -> None:
    """Against arithmetic on Python numbers, bit for bit; 255 is NaN, and only overflow is not exact."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    actual = dequantize(packed, scales, dtype)
    signed = [*VALUES, *(-v for v in VALUES)]
    row = torch.tensor([signed[n] for byte in range(256) for n in (byte & 15, byte >> 4)], dtype=torch.float64)
    powers = torch.tensor([math.ldexp(1.0, s - 127) for s in range(255)], dtype=torch.float64)
    expected = (row * powers[:, None]).to(dtype)
    assert torch.equal(_bits(actual[:255]), _bits(expected))
    assert actual[255].isnan().all()
    exact = row * powers[:, None]
    kept = expected.isfinite()
    assert torch.equal(expected.double()[kept], exact[kept])
    assert bool((exact[~kept].abs() > 3.4e38).all())


@DEQUANTIZE
def test_low_nibble_comes_first(dequantize: Fn) -> None:
    packed = torch.zeros(16, dtype=torch.uint8)
    packed[:2] = torch.tensor([0x72, 0x0F], dtype=torch.uint8)
    out = dequantize(packed, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert out[:4].tolist() == [2.0, 12.0, -12.0, 0.0]


@QUANTIZE
def test_rounding_to_even_and_saturation(quantize: Fn) -> None:
    # The first element fixes the scale at 1.
    halves = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 0.26: 1, 5.1: 7, 7.9: 7}
    x = torch.zeros(1, 32)
    x[0, 0] = 4.0
    for i, value in enumerate(halves):
        x[0, 1 + i], x[0, 17 + i] = value, -value
    packed, scales = quantize(x)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten().tolist()
    assert scales.tolist() == [[127]]
    assert codes[1 : 1 + len(halves)] == list(halves.values())
    assert codes[17 : 17 + len(halves)] == [8 + c for c in halves.values()]


@QUANTIZE
def test_scale_ends_and_specials(quantize: Fn) -> None:
    x = torch.zeros(6, 32)
    x[1, 0], x[2, 0], x[3, 0], x[4, 5], x[5, 5] = 1e-45, 3e38, -(2.0**-125), torch.nan, -torch.inf
    packed, scales = quantize(x)
    assert scales[:, 0].tolist() == [0, 0, 252, 0, 255, 255]
    assert not packed[4:].any()
    back = mx_dequantize(packed, scales, torch.float32)
    assert back[4:].isnan().all()
    assert back[3, 0] == -(2.0**-125)
    assert back[2, 0] == 6 * 2.0**125


@QUANTIZE
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999), low=st.integers(0, 248), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_numbers_that_are_mxfp4_come_back(quantize: Fn, seed: int, low: int, dtype: torch.dtype) -> None:
    packed, scales = random_codes(torch.Generator().manual_seed(seed), 7, 96, low=low, high=low + 5)
    x = mx_dequantize(packed, scales, dtype)
    again, powers = quantize(x)
    assert torch.equal(mx_dequantize(again, powers, dtype), x)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), spread=st.integers(-148, 126), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_cpu_quantises_as_the_reference(seed: int, spread: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(16, 64, generator=g) * torch.exp2(torch.tensor(float(spread)))).to(dtype)
    x[::3] = (torch.randint(-28, 29, x[::3].shape, generator=g) / 4).to(dtype)
    expected, actual = mx_quantize(x), _cpu("mx_quantize")(x)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@QUANTIZE
def test_error_is_within_half_a_step(quantize: Fn) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    packed, scales = quantize(x)
    error = (mx_dequantize(packed, scales, torch.float32) - x).abs().unflatten(-1, (-1, 32))
    # The coarsest step is 2 scales wide; an element between 6 and 8 scales saturates.
    assert bool((error <= 2 * torch.exp2(scales.float() - 127)[..., None]).all())
    assert 0.08 < float(error.square().mean().sqrt() / x.square().mean().sqrt()) < 0.14
