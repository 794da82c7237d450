"""Weights in the layouts `tile.h` reads: blocks of 32 output rows, one input channel after another."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3hal.backends.cpu._huge_pages import zeros

LANES = 32
KIND = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights [..., R, D] in blocks of 32 rows; see `tile.h` for the order within a block.

    `data` is fp32 [..., blocks, D, 32], bf16 [..., blocks, ceil(D / 2), 32, 2], or u8 [..., blocks, D / 8, 32, 4] of
    MXFP4 codes with `scales` [..., blocks, D / 32, 32].
    """

    data: Tensor
    scales: Tensor | None
    rows: int
    depth: int
    kind: int = field(init=False)
    pointers: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        # Read at every call: asking the tensors each time would cost as much as the smallest products.
        object.__setattr__(self, "kind", KIND[self.data.dtype])
        scales = 0 if self.scales is None else self.scales.data_ptr()
        object.__setattr__(self, "pointers", (self.data.data_ptr(), scales))


def pack(weight: Tensor) -> Packed:
    """Pack fp32 or bf16 weights [..., R, D].

    fp32 weights that bf16 holds exactly (a bf16 checkpoint run in fp32) are kept as bf16: the same numbers in half the
    bytes, and bytes are what decoding waits for.
    """
    rows, depth = weight.shape[-2:]
    exact = weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight)
    dtype = torch.bfloat16 if exact else weight.dtype
    step = 2 if dtype == torch.bfloat16 else 1
    blocks = -(-rows // LANES)
    data = zeros(*weight.shape[:-2], blocks, -(-depth // step), LANES, step, dtype=dtype)
    by_row = data.transpose(-2, -3)  # [..., blocks, 32, D / step, step]
    for channel in range(step):
        source, target = weight[..., channel::step], by_row[..., channel]
        whole, count = rows // LANES, source.shape[-1]
        target[..., :whole, :, :count].copy_(source[..., : whole * LANES, :].unflatten(-2, (whole, LANES)))
        if whole < blocks:
            target[..., whole, : rows - whole * LANES, :count].copy_(source[..., whole * LANES :, :])
    return Packed(data.squeeze(-1) if step == 1 else data, None, rows, depth)


def pack_mxfp4(codes: Tensor, scales: Tensor) -> Packed:
    """Pack MXFP4 weights as `mx_dequantize` takes them: codes u8 [..., R, D / 2], scales u8 [..., R, D / 32].

    4.25 bits a weight as before; the padding rows of the last block are zeros. One matrix at a time, so that little
    more than the result is in memory.
    """
    rows, depth = codes.shape[-2], 2 * codes.shape[-1]
    blocks = -(-rows // LANES)
    data = zeros(*codes.shape[:-2], blocks, depth // 8, LANES, 4, dtype=torch.uint8)
    for out, matrix in zip(data.view(-1, *data.shape[-4:]), codes.reshape(-1, *codes.shape[-2:]), strict=True):
        whole = torch.zeros(blocks * LANES, depth // 2, dtype=torch.uint8)
        whole[:rows] = matrix
        out.copy_(whole.view(blocks, LANES, depth // 8, 4).transpose(1, 2))
    padded = torch.zeros(*scales.shape[:-2], blocks * LANES, scales.shape[-1], dtype=torch.uint8)
    padded[..., :rows, :] = scales
    by_channel = zeros(*scales.shape[:-2], blocks, scales.shape[-1], LANES, dtype=torch.uint8)
    by_channel.copy_(padded.unflatten(-2, (blocks, LANES)).transpose(-1, -2))
    return Packed(data, by_channel, rows, depth)
