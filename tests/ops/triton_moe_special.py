"""What samples do not reach in the MoE kernels, tried under the interpreter; see `test_triton_moe.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from k3hal.backends.triton._experts import PACKED, Cut
from k3hal.backends.triton._int4 import pack as pack_int4
from k3hal.backends.triton._mxfp4 import pack
from k3hal.backends.triton._triton import kernels
from k3hal.backends.triton.moe_experts_int4 import CUT
from k3hal.dispatch.ops._experts import Routing
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded
from k3hal.dispatch.ops.moe_experts_int4 import int4_weights, moe_experts_int4
from k3hal.dispatch.ops.moe_experts_mxfp4 import moe_experts_mxfp4
from k3hal.dispatch.ops.mx_dequantize import random_codes


def sorted_on_the_device() -> list[str]:
    """By either way every choice is in one tile of its expert, in order, and no tile holds anything else."""
    experts, wrong = kernels("experts"), []
    for tokens, top_k, count, height, absent in ((30, 4, 9, 16, 0.3), (130, 16, 20, 64, 0.1), (140, 15, 16, 16, 1.0)):
        g = torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, count, generator=g).argsort(dim=-1)[:, :top_k].int()
        ids[torch.rand(ids.shape, generator=g) < absent] = -1
        wide = torch.cat([ids, torch.full_like(ids, 5)], dim=1)
        owner, rows, tiles = experts._tiles(wide[:, :top_k], count, height)
        found: dict[int, list[int]] = {}
        for e, row in zip(owner.tolist(), rows.view(tiles, height).tolist(), strict=True):
            if e >= 0:
                held = [c for c in row if c >= 0]
                found.setdefault(e, []).extend(held)
                if row[: len(held)] != held or not held:
                    wrong.append(f"{tokens} tokens: a tile of expert {e} is {row}")
        wanted = {e: (ids.flatten() == e).nonzero().flatten().tolist() for e in range(count) if (ids == e).any()}
        if found != wanted:
            wrong.append(f"{tokens} tokens: {found} instead of {wanted}")
    return wrong


def _error(tokens: int, hidden: int, inner: int, dtype: torch.dtype) -> float:
    """The largest error of a small layer in units of its largest output."""
    g = torch.Generator().manual_seed(hidden)
    w13 = random_codes(g, 2, 2 * inner, hidden, low=119, high=123)
    w2 = random_codes(g, 2, hidden, inner, low=119, high=123)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    ids = torch.tensor([[1, 0]], dtype=torch.int32).repeat(tokens, 1)
    weights = torch.rand(tokens, 2, generator=g)
    packed, betas = (*pack(*w13), *pack(*w2)), (4.0, 25.0)
    got = kernels("experts").sum_of_experts(x, ids, weights, *packed, "situ", betas, PACKED, format="mxfp4")
    wanted: Tensor = moe_experts_mxfp4(x.float(), ids, weights, *w13, *w2, "situ", 4.0, 25.0)
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def blocks_not_whole() -> list[str]:
    """K of one block and a part, and of two and a part."""
    errors = {shape: _error(3, *shape, torch.float32) for shape in ((160, 288), (288, 160))}
    return [f"{shape}: {error}" for shape, error in errors.items() if not error < 1e-5]


def tall_tiles() -> list[str]:
    """Tiles of 64 and of 128 choices, the last not full."""
    errors = {tokens: _error(tokens, 64, 64, torch.bfloat16) for tokens in (41, 133)}
    return [f"{tokens} tokens: {error}" for tokens, error in errors.items() if not error < 0.01]


def tokens_in_passes() -> list[str]:
    """More tokens than are taken at a time."""
    vars(kernels("experts"))["MOST"] = 5
    error = _error(12, 32, 32, torch.float32)
    return [] if error < 1e-5 else [str(error)]


def rounded_to_mxfp8() -> list[str]:
    """Bit for bit what the operator rounds to: halves, what saturates, zeros, the smallest and largest scales, NaN."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=g) * torch.exp2(torch.randint(-140, 127, (64, 1), generator=g).float())
    x[0] = torch.arange(-16, 16) / 16 + 1  # halves between the eight steps of a binade
    x[1], x[2], x[3, 5], x[4, 6] = 1.99, 0.0, torch.nan, torch.inf
    x[5], x[5, 0] = 2.0**-9 * torch.arange(32), 448.0  # below E4M3's smallest normal number
    mx, wrong = kernels("mxfp8"), []
    for dtype in (torch.float32, torch.bfloat16):
        value = x.to(dtype)
        wanted, (codes, scales) = mxfp8_rounded(value), mx.quantize_rows(value)
        from_codes = codes.float() * torch.exp2(scales.double() - 127)
        for name, got in (("values", mx.round_rows(value)), ("codes", from_codes)):
            if not torch.equal(got.double().nan_to_num(7.0), wanted.double().nan_to_num(7.0)):
                wrong.append(f"{name} of {dtype}: {(got.double() - wanted.double()).abs().max()}")
    return wrong


def _int4_error(tokens: int, hidden: int, inner: int, dtype: torch.dtype, cut: Cut) -> float:
    """The largest error of a small layer of int4 in units of its largest output."""
    g = torch.Generator().manual_seed(hidden)
    routing = Routing("small", tokens, 2, 2, hidden, inner, str(dtype).removeprefix("torch."), ())
    stacks = int4_weights(g, routing)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    ids = torch.tensor([[1, 0]], dtype=torch.int32).repeat(tokens, 1)
    weights = torch.rand(tokens, 2, generator=g)
    packed = (*pack_int4(stacks["w13"], stacks["w13_scale"]), *pack_int4(stacks["w2"], stacks["w2_scale"]))
    got = kernels("experts").sum_of_experts(x, ids, weights, *packed, "situ", (4.0, 25.0), cut, format="int4")
    wanted: Tensor = moe_experts_int4(x.float(), ids, weights, **stacks, activation="situ", beta=4.0, linear_beta=25.0)
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def int4_layers() -> list[str]:
    """K of less than a block and of more, tiles of 64 and of 128 choices, and more tokens than are taken at a time."""
    vars(kernels("experts"))["MOST"] = 140
    wrong = []
    for tokens, hidden, inner in ((1, 32, 96), (3, 160, 32), (9, 288, 160), (150, 64, 64)):
        error = _int4_error(tokens, hidden, inner, torch.float32, CUT)
        wrong += [] if error < 1e-5 else [f"{tokens} tokens, {hidden} by {inner}: {error}"]
    for tokens, cut in ((41, CUT), (133, replace(CUT, tallest=128))):
        error = _int4_error(tokens, 64, 64, torch.bfloat16, cut)
        wrong += [] if error < 0.01 else [f"{tokens} tokens: {error}"]
    return wrong


SPECIAL = (sorted_on_the_device, blocks_not_whole, tall_tiles, tokens_in_passes, rounded_to_mxfp8, int4_layers)
