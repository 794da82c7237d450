"""OCP MXFP4 codes and scales to numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import MOST_DRAWN

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e8m0(scales: Tensor) -> Tensor:
    """2^(s - 127) in fp64; 255 is NaN."""
    value = torch.exp2(scales.double() - 127)
    return value.masked_fill(scales == 255, torch.nan)


def mx_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`value(nibble) * 2^(scale - 127)` as `dtype` [.., D].

    packed u8 [.., D / 2]: element 2 i in the low nibble of byte i, 2 i + 1 in the high; a nibble is E2M1 (sign bit 3,
    magnitudes 0 0.5 1 1.5 2 3 4 6). scales u8 [.., D / 32] E8M0: 255 is NaN. The product is exact in bfloat16 and
    float32 unless it overflows, which gives infinity. Nothing mutated. Source: k3_architecture.md §6.
    """
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float64, device=packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    groups = table[nibbles.long()].unflatten(-1, (-1, GROUP))
    return (groups * e8m0(scales)[..., None]).flatten(-2).to(dtype)


def random_codes(g: torch.Generator, *shape: int, low: int = 118, high: int = 124) -> tuple[Tensor, Tensor]:
    """Random codes for values of `shape` and scales in [low, high).

    Of more than `MOST_DRAWN` values the first axis repeats, each repetition with other bits flipped: random still.
    """
    scales = torch.randint(low, high, (*shape[:-1], shape[-1] // GROUP), dtype=torch.uint8, generator=g)
    bytes_shape, drawn = (*shape[:-1], shape[-1] // 2), max(1, MOST_DRAWN // max(1, prod(shape[1:])))
    if len(shape) == 1 or shape[0] <= drawn:
        return torch.randint(0, 256, bytes_shape, dtype=torch.uint8, generator=g), scales
    packed = torch.randint(0, 256, (drawn, *bytes_shape[1:]), dtype=torch.uint8, generator=g)
    flips = torch.randint(0, 256, (shape[0], *[1] * (len(shape) - 1)), dtype=torch.uint8, generator=g)
    return torch.cat([packed[: shape[0] - i] ^ flips[i : i + drawn] for i in range(0, shape[0], drawn)]), scales


def _sample(name: str, shape: tuple[int, ...], dtype: str, tags: set[str], low: int = 118, high: int = 124) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        packed, scales = random_codes(g, *shape, low=low, high=high)
        if name == "every_code":
            packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
            scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
        return {"packed": packed, "scales": scales, "dtype": getattr(torch, dtype)}

    return Sample(name, make, {"dim": shape[-1]}, dtype, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, every byte under every scale, no rows, and a K3 expert's slice."""
    yield _sample("tiny", (3, 64), "bfloat16", {"tiny"})
    yield _sample("batched", (2, 3, 96), "float32", {"tiny"})
    yield _sample("one_group", (32,), "float32", {"edge"})
    yield _sample("no_rows", (0, 64), "bfloat16", {"edge", "adversarial"})
    yield _sample("every_code", (256, 512), "float32", {"edge", "adversarial"})
    yield _sample("every_code", (256, 512), "bfloat16", {"edge", "adversarial"})
    yield _sample("smallest", (2, 64), "bfloat16", {"edge", "adversarial"}, 0, 3)
    yield _sample("largest", (2, 64), "float32", {"edge", "adversarial"}, 252, 255)
    yield _sample("k3_expert_tp8", (768, 3584), "bfloat16", {"k3"})


def cost(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Cost:
    """One multiplication an element."""
    return Cost(2.0 * packed.numel(), packed.nbytes + scales.nbytes + 2.0 * packed.numel() * dtype.itemsize)


OPERATOR = Operator(
    reference=mx_dequantize,
    family="mx",
    outputs={"out": "exact"},
    samples=samples,
    cost=cost,
    invariants=("every_code",),
)
