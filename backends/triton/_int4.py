"""int4 weights in the layout that Triton kernels decode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3hal.backends.triton._mxfp4 import DEPTH, ROWS
from k3hal.dispatch.ops.mx_dequantize import GROUP

_CHUNK = 1 << 24


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Words int32 [E, N / 16, B, 16, 16] and scales [E, N / 16, B, 16, 4] of codes u8 [E, N, K / 2] and scales
    [E, N, K / 32], with K padded by zeros to B blocks of 128; N is a multiple of 16.

    In block b, bits 16 h + 4 j to 16 h + 4 j + 3 of word c are column 128 b + 32 j + 2 c + h, and scale j is that of
    columns 32 j to 32 j + 31.
    """
    experts, n, half = codes.shape
    blocks = -(-2 * half // DEPTH)
    words = torch.empty(experts, n // ROWS, blocks, ROWS, DEPTH // 8, dtype=torch.int32, device=codes.device)
    step = max(1, _CHUNK // (n * blocks * DEPTH))
    for a in range(0, experts, step):
        words[a : a + step] = _words(pad(codes[a : a + step], (0, blocks * DEPTH // 2 - half)))
    whole = pad(scales, (0, blocks * DEPTH // GROUP - scales.shape[2]))
    return words, whole.unflatten(2, (-1, DEPTH // GROUP)).unflatten(1, (-1, ROWS)).transpose(2, 3).contiguous()


def _words(codes: Tensor) -> Tensor:
    # [e, N / 16, row, block, j, c]: byte c of a group of 32 columns holds its columns 2 c and 2 c + 1.
    grouped = codes.unflatten(2, (-1, 4, 16)).unflatten(1, (-1, ROWS)).int()
    words = torch.zeros_like(grouped[..., 0, :])
    for j in range(4):
        byte = grouped[..., j, :]
        words |= (byte & 15) << 4 * j | (byte >> 4) << 4 * j + 16
    return words.transpose(2, 3)
