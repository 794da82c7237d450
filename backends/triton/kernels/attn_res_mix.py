"""Attention residuals in one launch, one program a row: add, scores over depth, mix, norm, and the stored block.

Two forms. `held` loads every source first and keeps them all in registers: the least latency, for few rows. `streamed`
reads one source after the other with a running softmax: many rows at a time per multiprocessor, for the bandwidth.
Both read each source once.
"""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_HELD = 8
"""Stored blocks that `held` can keep beside the running sum: 9 rows of 7168 bfloat16 are 72 registers a thread."""
HELD_WARPS = 16


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
def _words(row):
    return row.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _low(word):
    """The first of the two bfloat16 in a word. Kept apart, each would take a register of its own."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(low, high):
    """A word of two bfloat16."""
    bottom = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    top = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return ((top << 16) | bottom).to(tl.int32, bitcast=True)


@triton.jit
def _score_pairs(word, key_low, key_high, dim, eps):
    low, high = _low(word), _high(word)
    square, product = tl.reduce((low * low + high * high, low * key_low + high * key_high), 0, _add_pairs)
    return product / tl.sqrt_rn(square / dim + eps)


@triton.jit
def _held(
    prefix, delta, blocks, key_weight, out_weight, out, prefix_stride, delta_stride, block_stride, row_stride, dim, eps,
    out_eps, zero, COUNT: tl.constexpr, RESET: tl.constexpr, ADD: tl.constexpr, STORE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`zero` is 0, which the compiler does not know: else it keeps what words were widened to from scores to mix."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK // 2)
    live = pair < dim // 2
    mine = _words(blocks + row * row_stride) + pair
    running = _words(prefix + row * prefix_stride) + pair
    sources = ()
    for j in tl.static_range(COUNT):
        sources = sources + (tl.load(mine + j * (block_stride // 2), live, 0),)
    keys = tl.load(key_weight.to(tl.pointer_type(tl.int64), bitcast=True) + pair, live, 0)
    key_low = keys.to(tl.int32).to(tl.float32, bitcast=True)
    key_high = (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if ADD:
        total = tl.load(_words(delta + row * delta_stride) + pair, live, 0)
        if not RESET:
            before = tl.load(running, live, 0)
            total = _rounded(_low(before) + _low(total), _high(before) + _high(total))
        tl.store(running, total, live)
    else:
        total = tl.load(running, live, 0)
    if STORE:
        tl.store(mine + COUNT * (block_stride // 2), total, live)
    own = _score_pairs(total, key_low, key_high, dim, eps)
    scores = ()
    largest = own
    for j in tl.static_range(COUNT):
        scores = scores + (_score_pairs(sources[j], key_low, key_high, dim, eps),)
        largest = tl.maximum(largest, scores[j])
    share = tl.exp(own - largest)
    low, high, shares = _low(total ^ zero) * share, _high(total ^ zero) * share, share
    for j in tl.static_range(COUNT):
        share = tl.exp(scores[j] - largest)
        low += _low(sources[j] ^ zero) * share
        high += _high(sources[j] ^ zero) * share
        shares += share
    mix = _rounded(low / shares, high / shares)
    if NORM:
        low, high = _low(mix), _high(mix)
        factor = 1 / tl.sqrt_rn(tl.sum(low * low + high * high) / dim + out_eps)
        scale = tl.load(_words(out_weight) + pair, live, 0)
        mix = _rounded(low * factor * _low(scale), high * factor * _high(scale))
    tl.store(_words(out + row * dim) + pair, mix, live)


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


def can_hold(
    prefix: Tensor, delta: Tensor | None, blocks: Tensor, num_blocks: int, key_weight: Tensor, out_weight: Tensor | None
) -> bool:  # fmt: skip
    """Whether the rows fit the registers, and are bfloat16 in whole words."""
    if num_blocks > MOST_HELD or prefix.dtype is not torch.bfloat16:
        return False
    odd = prefix.shape[1] | prefix.stride(0) | blocks.stride(0) | blocks.stride(1)
    address = prefix.data_ptr() | blocks.data_ptr() | key_weight.data_ptr() >> 1
    if delta is not None:
        odd, address = odd | delta.stride(0), address | delta.data_ptr()
    if out_weight is not None:
        address |= out_weight.data_ptr()
    return odd % 2 == 0 and address % 4 == 0


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
        blocks.stride(1), dim, eps, out_eps,
    )  # fmt: skip
    form = (num_blocks, reset, delta is not None, store, out_weight is not None, block)
    most = max(block // 256, 1)
    if held:
        _held[(rows,)](*args, 0, *form, num_warps=min(most, HELD_WARPS))
    else:
        _streamed[(rows,)](*args, *form, stages, num_warps=min(most, warps))
    return out
