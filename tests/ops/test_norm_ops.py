"""Norms, gates, embedding and convolution against plain formulas, small and beyond one block of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from k3hal.dispatch.sampling_inputs import int32, offsets, spread

from .kda_layer import KINDS, bound, relative_error

SHAPES = [(3, 64), (700, 512)]


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(kind: str, shape: tuple[int, int]) -> None:
    x, weight, residual = spread(_randn(*shape)), _randn(shape[1], seed=1), _randn(*shape, seed=2)
    total = residual + x
    out = bound("rms_norm", kind)(x=x, weight=weight, eps=1e-5, residual=residual)
    assert torch.equal(residual, total)
    assert relative_error(out, _rms(total, weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm_rounds_once_in_bf16(kind: str) -> None:
    x, weight = _randn(9, 512).bfloat16(), (_randn(512, seed=1)).bfloat16()
    residual = _randn(9, 512, seed=2).bfloat16()
    rounded = (x.float() + residual.float()).bfloat16()
    out = bound("rms_norm", kind, "bfloat16")(x=x, weight=weight, eps=1e-5, residual=residual)
    assert torch.equal(residual, rounded)
    exact = _rms(rounded, weight, 1e-5).to(torch.bfloat16)
    assert (out != exact).float().mean() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 1200])
def test_gated_rms_norm(kind: str, rows: int) -> None:
    x, gate, weight = _randn(rows, 4, 64), spread(_randn(rows, 4, 64, seed=1)), _randn(64, seed=2)
    out = bound("gated_rms_norm", kind)(x=x, gate=gate, weight=weight, eps=1e-5)
    assert relative_error(out, _rms(x, weight, 1e-5) * torch.sigmoid(gate.double())) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sigmoid_gate(kind: str, shape: tuple[int, int]) -> None:
    x, gate = _randn(*shape), spread(_randn(*shape, seed=1))
    out = bound("sigmoid_gate", kind)(x=x, gate=gate)
    assert relative_error(out, x.double() / (1 + (-gate.double()).exp())) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_embed(kind: str) -> None:
    table = _randn(7, 5)
    out = bound("embed", kind)(ids=torch.tensor([6, -1, 0, 6]), weight=table)
    assert torch.equal(out, torch.stack((table[6], torch.zeros(5), table[0], table[6])))


@pytest.mark.parametrize("kind", KINDS)
def test_convolution_is_torchs_with_zero_history(kind: str) -> None:
    lengths, channels = (1500, 1, 0, 2, 9), 192
    x, weight = _randn(sum(lengths), channels), _randn(channels, 4, seed=1)
    caches = torch.full((6, 3, channels), torch.nan)
    out = bound("causal_conv1d", kind)(
        x=x, weight=weight, conv_state=caches, slots=int32([5, 1, 2, 3, 4]), cu_seqlens=offsets(lengths),
        has_state=torch.zeros(5, dtype=torch.bool),
    )  # fmt: skip
    for slot, rows, result in zip((5, 1, 2, 3, 4), x.split(lengths), out.split(lengths), strict=True):
        if not len(rows):
            assert caches[slot].isnan().all()
            continue
        padded = torch.cat((torch.zeros(3, channels), rows))
        expected = silu(conv1d(padded.double().t()[None], weight.double()[:, None], groups=channels))[0].t()
        assert relative_error(result, expected) < 1e-6
        assert torch.equal(caches[slot], padded[-3:])


@pytest.mark.parametrize("kind", KINDS)
def test_decay_forms(kind: str) -> None:
    """Bounded: the bound times a sigmoid. Unbounded: softplus. In both the bias is added before the rate."""
    raw, logits = torch.tensor([[[0.5, -20.0, 20.0]]]), torch.zeros(1, 1)
    rate, bias = 2.0, torch.tensor([[0.25, 0.0, 0.0]])
    args = {"raw_gate": raw, "beta_logits": logits, "A_log": torch.tensor([rate]).log(), "dt_bias": bias}
    g, beta = bound("kda_gate", kind)(**args, lower_bound=-5.0)
    expected = -5 / (1 + (-rate * (raw + bias).double()).exp())
    assert torch.allclose(g.double(), expected, rtol=1e-6) and (g <= 0).all() and (g >= -5).all()
    assert beta.item() == 0.5
    g, _ = bound("kda_gate", kind)(**args, lower_bound=None)
    expected = -rate * torch.log1p((raw + bias).double().exp())
    assert torch.allclose(g.double(), expected, rtol=1e-6)
