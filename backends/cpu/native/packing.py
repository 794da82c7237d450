"""Weights in the layout `tile.h` reads: blocks of 32 output rows, one input channel after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 32
KIND = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights [..., R, D] as `data` [..., blocks, D, 32]; `scales` [..., blocks, D / 32, 32] for MXFP4 codes."""

    data: Tensor
    scales: Tensor | None
    rows: int
    depth: int

    @property
    def kind(self) -> int:
        return KIND[self.data.dtype]

    @property
    def pointers(self) -> tuple[int, int]:
        return self.data.data_ptr(), 0 if self.scales is None else self.scales.data_ptr()


def pack(weight: Tensor) -> Packed:
    """Pack fp32 or bf16 weights [..., R, D].

    fp32 weights that bf16 holds exactly (a bf16 checkpoint run in fp32) are kept as bf16: the same numbers in half the
    bytes, and bytes are what decoding waits for.
    """
    rows, depth = weight.shape[-2:]
    exact = weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight)
    dtype = torch.bfloat16 if exact else weight.dtype
    blocks = -(-rows // LANES)
    data = torch.zeros(*weight.shape[:-2], blocks, depth, LANES, dtype=dtype)
    whole = rows // LANES
    by_row = data.transpose(-1, -2)
    by_row[..., :whole, :, :].copy_(weight[..., : whole * LANES, :].unflatten(-2, (whole, LANES)))
    if whole < blocks:
        by_row[..., whole, : rows - whole * LANES, :].copy_(weight[..., whole * LANES :, :])
    return Packed(data, None, rows, depth)


def pack_mxfp4(codes: Tensor, scales: Tensor) -> Packed:
    """Pack MXFP4 weights as `mx_dequantize` takes them: codes u8 [..., R, D / 2], scales u8 [..., R, D / 32].

    4.25 bits a weight as before; the padding rows of the last block are zeros. One matrix at a time, so that little
    more than the result is in memory.
    """
    rows, depth = codes.shape[-2], 2 * codes.shape[-1]
    blocks = -(-rows // LANES)
    data = torch.empty(*codes.shape[:-2], blocks, depth, LANES // 2, dtype=torch.uint8)
    for out, matrix in zip(data.view(-1, *data.shape[-3:]), codes.reshape(-1, *codes.shape[-2:]), strict=True):
        nibbles = torch.zeros(blocks * LANES, depth, dtype=torch.uint8)
        nibbles[:rows, ::2] = matrix & 15
        nibbles[:rows, 1::2] = matrix >> 4
        low, high = nibbles.view(blocks, 2, LANES // 2, depth).unbind(1)
        out.copy_((low | (high << 4)).transpose(-1, -2))
    padded = torch.zeros(*scales.shape[:-2], blocks * LANES, scales.shape[-1], dtype=torch.uint8)
    padded[..., :rows, :] = scales
    by_channel = padded.unflatten(-2, (blocks, LANES)).transpose(-1, -2).contiguous()
    return Packed(data, by_channel, rows, depth)
