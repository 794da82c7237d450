"""The oracle's formulas one by one, against values worked out another way."""

import math

import pytest
import torch

from .k3_naive import (
    attn_res_mix,
    causal_conv,
    dequantize_mxfp4,
    kda_log_decay,
    kda_recurrence,
    l2_norm,
    rms_norm,
    situ,
)

F64 = torch.float64


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_mxfp4_codes_nibble_order_and_scales() -> None:
    packed = torch.tensor([[low | (15 - low) << 4 for low in range(16)]], dtype=torch.uint8)
    scale = torch.tensor([[128]], dtype=torch.uint8)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = [2 * table[code] for low in range(16) for code in (low, 15 - low)]
    assert dequantize_mxfp4(packed, scale)[0].tolist() == expected


def test_mxfp4_scale_belongs_to_its_32_columns_and_fits_bfloat16() -> None:
    packed = torch.randint(0, 256, (5, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor([[100, 127, 140]] * 5, dtype=torch.uint8)
    unscaled = dequantize_mxfp4(packed, torch.full_like(scale, 127))
    scaled = dequantize_mxfp4(packed, scale)
    for group, exponent in enumerate((100, 127, 140)):
        columns = slice(32 * group, 32 * group + 32)
        assert torch.equal(scaled[:, columns], unscaled[:, columns] * 2.0 ** (exponent - 127))
    assert torch.equal(scaled.bfloat16().double(), scaled)


def test_situ_is_silu_near_zero_and_capped_far_away() -> None:
    gate, up = _random(200) * 1e-3, _random(200, seed=1) * 1e-3
    silu = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(situ(gate, up, 4.0, 25.0), silu, rtol=1e-6, atol=0)
    far = torch.tensor([1e4, -1e4, 60.0], dtype=F64)
    assert situ(far, torch.full_like(far, 1e6), 4.0, 25.0).tolist() == [100.0, 0.0, pytest.approx(100.0, rel=1e-12)]
    assert situ(far[:1], -far[:1], 4.0, 25.0).item() == -100.0


def test_situ_sigmoid_sees_the_uncapped_gate() -> None:
    gate = torch.tensor([8.0], dtype=F64)
    expected = 4 * math.tanh(2) / (1 + math.exp(-8)) * 25 * math.tanh(1 / 25)
    assert situ(gate, torch.ones(1, dtype=F64), 4.0, 25.0).item() == pytest.approx(expected, rel=1e-14)


def test_norms_put_their_epsilon_on_mean_and_on_sum() -> None:
    x = torch.full((1, 4), 1e-3, dtype=F64)
    assert rms_norm(x, torch.full((4,), 2.0, dtype=F64), 1e-6)[0, 0].item() == pytest.approx(2e-3 / math.sqrt(2e-6))
    assert l2_norm(x)[0, 0].item() == pytest.approx(1e-3 / math.sqrt(5e-6))


def test_convolution_weights_the_current_token_with_the_last_tap() -> None:
    x = torch.eye(6, 1, dtype=F64)
    taps = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=F64)
    linear = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, 0.0], dtype=F64)
    assert torch.equal(causal_conv(x, taps)[:, 0], linear * torch.sigmoid(linear))


def test_bounded_decay_stays_inside_its_bound_and_softplus_does_not() -> None:
    decay = torch.tensor([-1e3, 0.0, 1e3], dtype=F64).view(3, 1, 1)
    a_log = torch.tensor([math.log(2.0)], dtype=F64)
    assert kda_log_decay(decay, a_log, -5.0).flatten().tolist() == [0.0, -2.5, -5.0]
    assert kda_log_decay(decay, a_log, None).flatten().tolist() == pytest.approx([0.0, -2 * math.log(2.0), -2e3])


def test_decay_rate_multiplies_inside_the_bounded_sigmoid() -> None:
    g = kda_log_decay(torch.tensor([[[0.3], [0.3]]], dtype=F64), torch.tensor([0.0, 1.0], dtype=F64), -5.0)
    expected = [-5 / (1 + math.exp(-0.3)), -5 / (1 + math.exp(-0.3 * math.e))]
    assert g.flatten().tolist() == pytest.approx(expected)


def test_two_token_recurrence_matches_its_closed_form() -> None:
    heads, dim, width = 3, 5, 4
    q, k = l2_norm(_random(2, heads, dim)), l2_norm(_random(2, heads, dim, seed=1))
    v, g = _random(2, heads, width, seed=2), -_random(2, heads, dim, seed=3).abs()
    beta = torch.sigmoid(_random(2, heads, seed=4))
    out = kda_recurrence(q, k, v, g, beta)
    for h in range(heads):
        first = beta[0, h] * v[0, h]
        decayed = torch.exp(g[1, h]) * k[0, h]
        second = beta[1, h] * (v[1, h] - (decayed @ k[1, h]) * first)
        expected = [
            (k[0, h] @ q[0, h]) * first,
            (decayed @ q[1, h]) * first + (k[1, h] @ q[1, h]) * second,
        ]
        torch.testing.assert_close(out[:, h], torch.stack(expected) * dim**-0.5, rtol=1e-12, atol=1e-14)


def test_recurrence_matches_the_triangular_solve_over_a_whole_sequence() -> None:
    length, heads, dim = 40, 2, 8
    q, k = l2_norm(_random(length, heads, dim)), l2_norm(_random(length, heads, dim, seed=1))
    v, g = _random(length, heads, dim, seed=2), -torch.rand(length, heads, dim, dtype=F64)
    beta = torch.sigmoid(_random(length, heads, seed=4))
    out = kda_recurrence(q, k, v, g, beta)
    total = g.cumsum(0)
    for h in range(heads):
        decay = torch.exp(total[:, None, h] - total[None, :, h])
        reads = torch.einsum("id,jd,ijd->ij", k[:, h], k[:, h], decay).tril(-1) * beta[:, h, None]
        eye = torch.eye(length, dtype=F64)
        updates = torch.linalg.solve_triangular(eye + reads, beta[:, h, None] * v[:, h], upper=False)
        scores = torch.einsum("id,jd,ijd->ij", q[:, h], k[:, h], decay).tril()
        torch.testing.assert_close(out[:, h], scores @ updates * dim**-0.5, rtol=1e-10, atol=1e-12)


def test_attn_res_mix_weighs_raw_values_by_normed_keys() -> None:
    sources = [_random(7, 16, seed=s) * 10**s for s in range(3)]
    weight, proj = _random(16, seed=8), _random(16, seed=9)
    mixed = attn_res_mix(sources, weight, proj, 1e-5)
    for t in range(7):
        scores = [
            sum(float(v[t, d] * weight[d] * proj[d]) for d in range(16)) / math.sqrt(float(v[t] @ v[t]) / 16 + 1e-5)
            for v in sources
        ]
        shares = [math.exp(s) / sum(map(math.exp, scores)) for s in scores]
        expected = shares[0] * sources[0][t] + shares[1] * sources[1][t] + shares[2] * sources[2][t]
        torch.testing.assert_close(mixed[t], expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(attn_res_mix(sources[:1], weight, proj, 1e-5), sources[0])
