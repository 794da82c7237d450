"""Routed experts by torch: few choices with each one's weights gathered, many expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY, SCRATCH_BYTES, blocks
from k3hal.dispatch import provides
from k3hal.dispatch.ops._experts import as_it_is, gated
from k3hal.dispatch.ops.mx_dequantize import GROUP, VALUES
from k3hal.dispatch.transforms import zeros_elsewhere

FEW = 1 << 13
"""Choices up to which no value goes to the host, as where a graph is captured."""
Chosen: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The weights of experts int64 [R] as fp32: w13 [R, 2 I, D] and w2 [R, D, I]."""


def _summed(
    x: Tensor, ids: Tensor, weights: Tensor, chosen: Chosen, experts: int, size: int, act: tuple[str, float, float],
    rounded: Callable[[Tensor], Tensor] = as_it_is,
) -> Tensor:  # fmt: skip
    """`moe_experts` of any format, whose experts take `size` bytes as fp32; `rounded` is what products make of rows."""
    tokens, choices = ids.shape
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if tokens * choices > FEW:
        for e in range(experts):
            token, choice = (ids == e).nonzero(as_tuple=True)
            if token.numel():
                w13, w2 = chosen(torch.full((1,), e, device=x.device))
                hidden = rounded(gated(rounded(x[token].float()) @ w13[0].T, *act))
                out.index_add_(0, token, hidden @ w2[0].T * weights[token, choice, None])
        return out.to(x.dtype)
    for rows in blocks(tokens, SCRATCH_BYTES // max(1, choices * size)):
        picked, there = ids[rows].flatten(), (ids[rows] >= 0).flatten()
        w13, w2 = chosen(picked.clamp_min(0).long())
        row = rounded(x[rows].float()).repeat_interleave(choices, 0).unsqueeze(-1)
        hidden = rounded(gated(torch.bmm(w13, row).squeeze(-1), *act)).unsqueeze(-1)
        each = torch.bmm(w2, hidden).squeeze(-1) * weights[rows].reshape(-1, 1)
        out[rows] = zeros_elsewhere(there, each).unflatten(0, (-1, choices)).sum(1)
    return out.to(x.dtype)


@provides("moe_experts", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator."""

    def chosen(e: Tensor) -> tuple[Tensor, Tensor]:
        return w13.index_select(0, e).float(), w2.index_select(0, e).float()

    size = 4 * (w13[0].numel() + w2[0].numel())
    return _summed(x, ids, weights, chosen, w13.shape[0], size, (activation, beta, linear_beta))


def _nibbles(packed: Tensor) -> Tensor:
    """Codes [.., D / 2], the low nibble first, as int64 [.., D]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    return (values.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)


def mxfp4_decoded(packed: Tensor, scales: Tensor) -> Tensor:
    """`mx_dequantize` as fp32, without fp64, which the NPU has not: the scale's exponent is put where fp32 has it.

    2^-127 (scale 0) is a subnormal number, and made as half of 2^-126.
    """
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float32, device=packed.device)
    bits = scales.int().clamp_min(1) << 23
    power = torch.where(scales == 0, bits.view(torch.float32) * 0.5, bits.view(torch.float32))
    return _scaled(table[_nibbles(packed)], torch.where(scales == 255, torch.nan, power))


def int4_decoded(packed: Tensor, scales: Tensor) -> Tensor:
    """`(nibble - 8) * scale` as fp32."""
    return _scaled(_nibbles(packed).float() - 8, scales.float())


def _decoded(
    decode: Callable[[Tensor, Tensor], Tensor], w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> Chosen:
    def chosen(e: Tensor) -> tuple[Tensor, Tensor]:
        first, second, *scales = (t.index_select(0, e) for t in (w13, w2, w13_scale, w2_scale))
        return decode(first, scales[0]), decode(second, scales[1])

    return chosen


@provides("moe_experts_mxfp4", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True, mxfp4="w4a16")
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator."""
    chosen = _decoded(mxfp4_decoded, w13, w13_scale, w2, w2_scale)
    size = 8 * (w13[0].numel() + w2[0].numel())
    return _summed(x, ids, weights, chosen, w13.shape[0], size, (activation, beta, linear_beta))


def _power(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, for exponents int32 from -127, a subnormal number's, to 127."""
    return torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23).view(torch.float32)


def mxfp8_rounded(x: Tensor) -> Tensor:
    """fp32 x rounded as the operator says, by arithmetic of fp32: not every NPU has E4M3."""
    groups = x.unflatten(-1, (-1, GROUP)).contiguous()
    largest = (groups.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    exponent = ((largest >> 23) - 135).clamp_min(-127)
    size = groups.abs() * _power(-exponent)
    # A sum with 1.5 times 2^23 steps keeps no bit below a step, of which a binade has eight.
    binade = (size.view(torch.int32) >> 23).clamp_min(121)
    steps = ((binade + 20) << 23 | 1 << 22).view(torch.float32)
    number = ((size + steps) - steps).clamp_max(448.0) * _power(exponent)
    return torch.where(largest < 0x7F800000, torch.copysign(number, groups), torch.nan).flatten(-2)


@provides("moe_experts_a8w4", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True, mxfp4="w4a16")
def moe_experts_a8w4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator."""
    chosen = _decoded(mxfp4_decoded, w13, w13_scale, w2, w2_scale)
    size, act = 8 * (w13[0].numel() + w2[0].numel()), (activation, beta, linear_beta)
    return _summed(x, ids, weights, chosen, w13.shape[0], size, act, mxfp8_rounded)


@provides("moe_experts_int4", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def moe_experts_int4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator."""
    chosen = _decoded(int4_decoded, w13, w13_scale, w2, w2_scale)
    size = 8 * (w13[0].numel() + w2[0].numel())
    return _summed(x, ids, weights, chosen, w13.shape[0], size, (activation, beta, linear_beta))
