"""Numbers to OCP MXFP4 codes and scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Outputs, Sample
from k3hal.dispatch.ops.mx_dequantize import GROUP, VALUES


def mx_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes u8 `[.., D / 2]` (low nibble first) and scales u8 `[.., D / 32]` of x `[.., D]`.

    x bfloat16 or float32, D a multiple of 32. A group's scale is 2^(floor(log2 amax) - 2) clamped to
    2^-127 .. 2^127 (a zero group takes the smallest); elements are x / scale rounded to E2M1, halves to even,
    saturating at 6, the sign of zero kept. A group with a non-finite element is all zero codes with scale 255, so that
    it comes back as NaN. fp64 inside; one exact half of 10,000 elements may round the other way. Nothing mutated.
    Source: OCP Microscaling formats 1.0 §6.3, k3_architecture.md §6.
    """
    groups = x.double().unflatten(-1, (-1, GROUP))
    finite = groups.isfinite().all(dim=-1)
    groups = groups.where(finite[..., None], 0.0)
    exponent = torch.frexp(groups.abs().amax(dim=-1)).exponent - 1
    scales = torch.where(groups.abs().amax(dim=-1) > 0, exponent - 2, -127).clamp(-127, 127)
    scaled = groups * torch.exp2(-scales.double())[..., None]
    magnitudes = torch.tensor(VALUES, dtype=torch.float64, device=x.device)
    # Distance to every code; an exact half goes to the even code, which `tie` makes the nearer one.
    distance = (scaled.abs().clamp(max=6.0)[..., None] - magnitudes).abs()
    tie = torch.arange(8, device=x.device) % 2 * 1e-9
    codes = (distance + tie).argmin(dim=-1) + 8 * torch.signbit(scaled)
    pairs = codes.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return packed, torch.where(finite, scales + 127, 255).to(torch.uint8)


_HALVES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where two magnitudes are equally near."""
ODD_TIES = 1e-4
"""The share of elements that may round an exact half the other way."""


def settle_ties(args: Mapping[str, Any], outputs: Outputs, golden: Outputs) -> Outputs:
    """The golden's codes wherever few enough exact halves went to the other neighbour."""
    packed = outputs["packed"], golden["packed"]
    have, wanted = (torch.stack([p & 15, p >> 4], dim=-1).flatten(-2).int() for p in packed)
    scale = torch.exp2(golden["scales"].double() - 127).repeat_interleave(GROUP, dim=-1)
    magnitude = (args["x"].double() / scale).abs()
    halves = torch.isin(magnitude, magnitude.new_tensor(_HALVES))
    odd = halves & ((have & 8) == (wanted & 8)) & (((have & 7) - (wanted & 7)).abs() == 1)
    if not 0 < int(odd.sum()) <= ODD_TIES * odd.numel():
        return outputs
    pairs = torch.where(odd, wanted, have).to(torch.uint8).unflatten(-1, (-1, 2))
    return {**outputs, "packed": pairs[..., 0] | pairs[..., 1] << 4}


def _sample(name: str, shape: tuple[int, ...], dtype: str, tags: set[str], spread: float = 1.0) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        x = torch.randn(*shape, generator=g) * spread
        if name == "halves":
            x = torch.randint(-28, 29, shape, generator=g) / 4
        elif name == "zero_groups":
            x[..., :GROUP] = 0.0
            x[..., GROUP] = -0.0
        elif name == "not_finite":
            x[0, 3], x[1, 40], x[1, 64] = torch.nan, torch.inf, -torch.inf
        elif name == "wide":
            x = x * torch.exp2(torch.randint(-148, 126, shape, generator=g).float())
        return {"x": x.to(getattr(torch, dtype))}

    return Sample(name, make, {"dim": shape[-1]}, dtype, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, exact halves, zero groups, subnormal and huge scales, non-finite groups, and K3 activations."""
    yield _sample("tiny", (3, 64), "float32", {"tiny"})
    yield _sample("batched", (2, 3, 96), "bfloat16", {"tiny"})
    yield _sample("no_rows", (0, 64), "bfloat16", {"edge", "adversarial"})
    yield _sample("halves", (64, 64), "float32", {"edge", "adversarial"})
    yield _sample("halves", (64, 64), "bfloat16", {"edge", "adversarial"})
    yield _sample("zero_groups", (4, 96), "float32", {"must", "edge", "adversarial"})
    yield _sample("not_finite", (3, 96), "float32", {"must", "edge", "adversarial"})
    yield _sample("wide", (64, 64), "float32", {"edge", "adversarial"})
    yield _sample("tiny_numbers", (4, 64), "float32", {"must", "edge", "adversarial"}, 1e-39)
    yield _sample("huge_numbers", (4, 64), "float32", {"edge", "adversarial"}, 1e38)
    yield _sample("k3_latent", (65, 3584), "bfloat16", {"k3"})


def cost(x: Tensor) -> Cost:
    """About ten operations an element."""
    return Cost(10.0 * x.numel(), x.nbytes + x.numel() * (1 / 2 + 1 / GROUP))


OPERATOR = Operator(
    reference=mx_quantize,
    family="mx",
    outputs={"packed": "exact", "scales": "exact"},
    samples=samples,
    cost=cost,
    invariants=("round_trip",),
    settle_ties=settle_ties,
)
