"""Faults of the matrix products and the embedding: accumulation, tiles, strides and edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right
from k3hal.conform.faults.norm import dense

LINEAR = Catalogue()
fault = LINEAR.fault
PLAIN = ("linear", "linear_fp32")
ALL = (*PLAIN, "head_linear")


@fault(*ALL)
def accumulates_in_bf16(right: Right, args: Arguments) -> Any:
    """Products of 16 channels each are added up in bf16."""
    total: Tensor | None = None
    for start in range(0, args["x"].shape[-1], 16):
        piece = {name: args[name][..., start : start + 16].contiguous() for name in ("x", "weight")}
        part = right(args, **piece)
        total = part.bfloat16() if total is None else total + part.bfloat16()
    assert total is not None
    return total.to(right(args).dtype)


@fault(*ALL)
def column_unwritten(right: Right, args: Arguments) -> Any:
    """The last output column, a tile of its own, is never written."""
    out = right(args)
    wrong = torch.empty_like(out)
    wrong[..., :-1] = out[..., :-1]
    return wrong


@fault(*ALL)
def column_zero(right: Right, args: Arguments) -> Any:
    """The last output column of a buffer that was cleared is never written."""
    out = right(args).clone()
    out[..., -1] = 0
    return out


@fault(*PLAIN, first="odd")
def last_channels_cut(right: Right, args: Arguments) -> Any:
    """The loop over channels leaves out what is not a whole tile of 16."""
    x = args["x"].clone()
    x[..., x.shape[-1] // 16 * 16 :] = 0
    return right(args, x=x)


@fault("head_linear", first="one_head")
def last_channel_cut(right: Right, args: Arguments) -> Any:
    """The loop over channels leaves out what is not a whole tile of 16."""
    return last_channels_cut(right, args)


@fault(*PLAIN, first="row_strided")
def rows_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The row stride of x is ignored."""
    return right(args, x=dense(args["x"]))


@fault("head_linear", first="strided")
def strides_ignored(right: Right, args: Arguments) -> Any:
    """x is taken as packed."""
    return right(args, x=dense(args["x"]))


@fault("head_linear", first="strided")
def weight_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The transposed slice that the weight is, is taken as packed."""
    return right(args, weight=dense(args["weight"]))


@fault("head_linear")
def weight_of_the_first_head(right: Right, args: Arguments) -> Any:
    """All heads take the first one's weight."""
    return right(args, weight=args["weight"][:1].expand_as(args["weight"]).contiguous())


@fault(*ALL, first="one_row")
def wrong_for_one_row(right: Right, args: Arguments) -> Any:
    """The kernel for a single row sums only the first half of the channels."""
    if args["x"].shape[0] != 1:
        return right(args)
    x = args["x"].clone()
    x[..., x.shape[-1] // 2 :] = 0
    return right(args, x=x)


@fault("linear", first="rows_9")
def nan_for_one_tile(right: Right, args: Arguments) -> Any:
    """The tile of 8 rows gives NaN when a second tile has a single row."""
    out = right(args)
    if out.shape[0] % 8 == 1 and out.shape[0] > 1:
        out[-1] = torch.nan
    return out


@fault("linear", first="rows_17")
def last_tile_repeats(right: Right, args: Arguments) -> Any:
    """The last tile of 16 rows starts at the row before and is written one row late."""
    out = right(args)
    if out.shape[0] > 16:
        out[-1] = out[-2].clone()
    return out


@fault("linear", "linear_fp32")
def rounded_twice(right: Right, args: Arguments) -> Any:
    """The result passes through fp16's range, or through bf16, on its way out."""
    out = right(args)
    return out.to(torch.float8_e5m2).to(out.dtype) if out.dtype is torch.bfloat16 else out.bfloat16().float()


@fault("linear_fp32")
def tf32(right: Right, args: Arguments) -> Any:
    """TF32: 10 bits of mantissa for both factors."""
    short = {name: _short(args[name]) for name in ("x", "weight")}
    return right(args, **short)


def _short(x: Tensor) -> Tensor:
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


@fault(*ALL)
def row_of_weights_shifted(right: Right, args: Arguments) -> Any:
    """The rows of a fused weight are cut one row late."""
    return right(args, weight=args["weight"].roll(1, -2))


@fault("embed", first="negative_ids")
def negative_id_wraps(right: Right, args: Arguments) -> Any:
    """A negative id takes a row from the table's end."""
    return args["weight"][args["ids"] % args["weight"].shape[0]]


@fault("embed", first="negative_ids")
def negative_id_clamped(right: Right, args: Arguments) -> Any:
    """A negative id takes row 0."""
    return right(args, ids=args["ids"].clamp_min(0))


@fault("embed")
def offset_of_the_rank(right: Right, args: Arguments) -> Any:
    """The rank's vocabulary offset is off by one."""
    return right(args, ids=torch.where(args["ids"] >= 0, (args["ids"] - 1).clamp_min(0), args["ids"]))


@fault("embed")
def scaled_by_width(right: Right, args: Arguments) -> Any:
    """Embeddings are multiplied by the root of the width, as another model family does."""
    out = right(args)
    return (out.float() * out.shape[-1] ** 0.5).to(out.dtype)


@fault("embed")
def through_bf16(right: Right, args: Arguments) -> Any:
    """An fp32 table is copied through bf16."""
    return right(args).bfloat16().to(args["weight"].dtype)
