"""Attention residuals in one launch, one program a row: add, scores over depth, mix, norm, and the stored block.

Two forms. `held` loads every source first and keeps them all in registers: the least latency, for few rows. `streamed`
reads one source after the other with a running softmax: many rows at a time per multiprocessor, for the bandwidth.
Both read each source once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_HELD = 8
"""Stored blocks that `held` can keep beside the running sum: 9 rows of 7168 in 16 bits are 72 registers a thread."""


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _score(wide, key, dim, eps):
    """`sum_d V * rsqrt(mean V^2 + eps) * key`: both sums in one reduction."""
    square, product = tl.reduce((wide * wide, wide * key), 0, _add_pairs)
    return product / tl.sqrt_rn(square / dim + eps)


@triton.jit
def _added(prefix, delta, at, live, RESET: tl.constexpr, ADD: tl.constexpr):
    """The running sum as it will be stored, and stored where it changes."""
    if ADD:
        total = tl.load(delta + at, live, 0.0)
        if not RESET:
            before = tl.load(prefix + at, live, 0.0)
            total = (before.to(tl.float32) + total.to(tl.float32)).to(prefix.dtype.element_ty)
        tl.store(prefix + at, total, live)
    else:
        total = tl.load(prefix + at, live, 0.0)
    return total


@triton.jit
def _finish(mix, out_weight, out, at, live, dim, out_eps, NORM: tl.constexpr):
    mix = mix.to(out.dtype.element_ty)
    if NORM:
        wide = mix.to(tl.float32)
        factor = 1 / tl.sqrt_rn(tl.sum(wide * wide) / dim + out_eps)
        mix = (wide * factor * tl.load(out_weight + at, live, 0.0).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + at, mix, live)


@triton.jit
def _held(
    prefix, delta, blocks, key_weight, out_weight, out, prefix_stride, delta_stride, block_stride, row_stride, dim, eps,
    out_eps, COUNT: tl.constexpr, RESET: tl.constexpr, ADD: tl.constexpr, STORE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < dim
    mine = blocks + row * row_stride + at
    sources = ()
    for j in tl.static_range(COUNT):
        sources = sources + (tl.load(mine + j * block_stride, live, 0.0),)
    key = tl.load(key_weight + at, live, 0.0)
    total = _added(prefix + row * prefix_stride, delta + row * delta_stride, at, live, RESET, ADD)
    if STORE:
        tl.store(mine + COUNT * block_stride, total, live)
    wide = total.to(tl.float32)
    own = _score(wide, key, dim, eps)
    scores = ()
    largest = own
    for j in tl.static_range(COUNT):
        scores = scores + (_score(sources[j].to(tl.float32), key, dim, eps),)
        largest = tl.maximum(largest, scores[j])
    share = tl.exp(own - largest)
    mix, shares = wide * share, share
    for j in tl.static_range(COUNT):
        share = tl.exp(scores[j] - largest)
        mix += sources[j].to(tl.float32) * share
        shares += share
    _finish(mix / shares, out_weight, out + row * dim, at, live, dim, out_eps, NORM)


@triton.jit
def _streamed(
    prefix, delta, blocks, key_weight, out_weight, out, prefix_stride, delta_stride, block_stride, row_stride, dim, eps,
    out_eps, count, RESET: tl.constexpr, ADD: tl.constexpr, STORE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < dim
    mine = blocks + row * row_stride + at
    key = tl.load(key_weight + at, live, 0.0)
    total = _added(prefix + row * prefix_stride, delta + row * delta_stride, at, live, RESET, ADD)
    if STORE:
        tl.store(mine + count * block_stride, total, live)
    mix = total.to(tl.float32)
    largest, shares = _score(mix, key, dim, eps), 1.0
    for j in tl.range(0, count, num_stages=STAGES):
        wide = tl.load(mine + j * block_stride, live, 0.0).to(tl.float32)
        score = _score(wide, key, dim, eps)
        above = tl.maximum(largest, score)
        kept, share = tl.exp(largest - above), tl.exp(score - above)
        mix = mix * kept + wide * share
        shares = shares * kept + share
        largest = above
    _finish(mix / shares, out_weight, out + row * dim, at, live, dim, out_eps, NORM)


def attn_res_mix(
    prefix: Tensor, delta: Tensor | None, blocks: Tensor, num_blocks: int, reset: bool, store: bool, key_weight: Tensor,
    out_weight: Tensor | None, eps: float, out_eps: float, held: bool, warps: int, stages: int,
) -> Tensor:  # fmt: skip
    """See the operator. `stages` sources of the streamed form are on their way at once."""
    rows, dim = prefix.shape
    out = torch.empty((rows, dim), dtype=prefix.dtype, device=prefix.device)
    if not rows:
        return out
    added, norm = prefix if delta is None else delta, key_weight if out_weight is None else out_weight
    block = triton.next_power_of_2(dim)
    args = (
        prefix, added, blocks, key_weight, norm, out, prefix.stride(0), added.stride(0), blocks.stride(0),
        blocks.stride(1), dim, eps, out_eps, num_blocks, reset, delta is not None, store, out_weight is not None, block,
    )  # fmt: skip
    warps = min(max(block // 256, 1), warps)
    if held:
        _held[(rows,)](*args, num_warps=warps)
    else:
        _streamed[(rows,)](*args, stages, num_warps=warps)
    return out
