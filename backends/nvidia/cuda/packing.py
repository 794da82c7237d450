"""MXFP4 weights in the layout that the CUDA kernels decode in 9 integer operations per 8 codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3hal.dispatch.errors import CheckpointError
from k3hal.dispatch.ops.mx_dequantize import GROUP

ROWS, DEPTH = 16, 128
"""Rows and columns of a unit: 1 KiB of consecutive words, four rows' worth of a tensor core's operand a lane."""
BIAS = 110
"""Added to a scale's exponent byte: codes read as bfloat16 bits are 2^-126 of their value and are used as 2^-16 of it,
so that no scale from 2^-127 to 2^17 leaves the exponents of bfloat16. Weights below 2^-110 lose bits to underflow."""
LARGEST = 254 - BIAS
_FIELDS = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 3, 4, 11), (28, 29, 30, 5))
"""Where in a word each of four codes has its bits, mantissa first and sign last; that of the next column has them 16
bits further on, past bit 31 from bit 0 on again. `fields` in `mxfp4.h` moves each to where bfloat16 has them."""
_CHUNK = 1 << 24


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Words int32 [E, N / 16, B, 16, 16] and scales int32 [E, N / 16, B, 16] of codes u8 [E, N, K / 2] and scales u8
    [E, N, K / 32], with K padded by zeros to B units of 128; N is a multiple of 16.

    Word 4 t + i of a row of unit b has columns 128 b + 32 j + 2 t + 8 i and the next one, for j from 0 to 3, and byte j
    of a scale word is the scale of columns 32 j to 32 j + 31, plus `BIAS`. Raises `CheckpointError` for a scale above
    2^17 or NaN.
    """
    experts, n, half = codes.shape
    blocks = -(-2 * half // DEPTH)
    words = torch.empty(experts, n // ROWS, blocks, ROWS, DEPTH // 8, dtype=torch.int32, device=codes.device)
    factors = torch.empty(experts, n // ROWS, blocks, ROWS, dtype=torch.int32, device=codes.device)
    step = max(1, _CHUNK // (n * blocks * DEPTH))
    for a in range(0, experts, step):
        words[a : a + step] = _words(pad(codes[a : a + step], (0, blocks * DEPTH // 2 - half)))
        empty = blocks * DEPTH // GROUP - scales.shape[2]
        factors[a : a + step] = _factors(pad(scales[a : a + step], (0, empty)))
    return words, factors


def _table(places: tuple[int, ...], device: torch.device) -> Tensor:
    """The word of every code."""
    words = [sum((code >> bit & 1) << place % 32 for bit, place in enumerate(places)) for code in range(16)]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).to(device)


def _words(codes: Tensor) -> Tensor:
    # [e, N / 16, row, block, j, i, t]: byte 4 i + t of a group of 32 columns holds its columns 8 i + 2 t and the next.
    grouped = codes.unflatten(2, (-1, 4, 4, 4)).unflatten(1, (-1, ROWS)).int()
    words = torch.zeros_like(grouped[..., 0, :, :])
    for j, places in enumerate(_FIELDS):
        byte = grouped[..., j, :, :]
        words |= _table(places, codes.device)[byte & 15]
        words |= _table(tuple(place + 16 for place in places), codes.device)[byte >> 4]
    return words.transpose(-1, -2).flatten(-2).transpose(2, 3)


def _factors(scales: Tensor) -> Tensor:
    biased = scales.int() + BIAS
    if biased.numel() and (largest := int(scales.max())) > LARGEST:
        raise CheckpointError(f"an MXFP4 scale byte is {largest}, above {LARGEST} (255 is NaN)")
    quads = biased.to(torch.uint8).unflatten(2, (-1, 4)).unflatten(1, (-1, ROWS))
    words = quads.view(torch.int32)[..., 0].transpose(2, 3)
    return words.unflatten(-1, (2, ROWS // 2)).transpose(-1, -2).flatten(-2)
