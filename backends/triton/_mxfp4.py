"""MXFP4 weights in the layout that Triton kernels decode in 11 integer operations per 8 codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3hal.dispatch.errors import CheckpointError
from k3hal.dispatch.ops.mx_dequantize import GROUP

ROWS, DEPTH = 16, 128
"""Rows and columns of a block, which is 1 KiB of consecutive words: 16 words a row, 8 codes a word."""
BIAS = 110
"""Added to a scale's exponent byte: codes read as bfloat16 bits are 2^-126 of their value and are used as 2^-16 of it,
so that no scale from 2^-127 to 2^17 leaves the exponents of bfloat16. Weights below 2^-110 lose bits to underflow."""
LARGEST = 254 - BIAS
_FIELDS = ((15, 6), (10, 3), (9, 0), (14, 11))
"""Where in 16 bits each of four codes has its sign and the lowest of its other three bits."""
_CHUNK = 1 << 24


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Words int32 [E, N / 16, B, 16, 16] and scales int32 [E, N / 16, B, 16] of codes u8 [E, N, K / 2] and scales u8
    [E, N, K / 32], with K padded by zeros to B blocks of 128; N is a multiple of 16.

    In block b, code j of the half h of word c is that of column 128 b + 32 j + 2 c + h, and byte j of a scale word is
    the scale of columns 32 j to 32 j + 31, plus `BIAS`. Raises `CheckpointError` for a scale above 2^17 or NaN.
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


def _words(codes: Tensor) -> Tensor:
    nibble = torch.arange(16, device=codes.device, dtype=torch.int32)
    # [e, N / 16, row, block, j, c]: byte c of a group of 32 columns holds its columns 2 c and 2 c + 1.
    grouped = codes.unflatten(2, (-1, 4, 16)).unflatten(1, (-1, ROWS)).int()
    words = torch.zeros_like(grouped[..., 0, :])
    for j, (sign, rest) in enumerate(_FIELDS):
        field = (nibble >> 3) << sign | (nibble & 7) << rest
        byte = grouped[..., j, :]
        words |= field[byte & 15] | field[byte >> 4] << 16
    return words.transpose(2, 3)


def _factors(scales: Tensor) -> Tensor:
    biased = scales.int() + BIAS
    if biased.numel() and not scales.is_meta and (largest := int(scales.max())) > LARGEST:
        raise CheckpointError(f"an MXFP4 scale byte is {largest}, above {LARGEST} (255 is NaN)")
    quads = biased.to(torch.uint8).unflatten(2, (-1, 4)).unflatten(1, (-1, ROWS))
    return quads.view(torch.int32)[..., 0].transpose(2, 3)
