"""Lossless acceptance of drafts in three launches: residuals of the block method, what is left to draw from, the draw.

How many drafts a row keeps takes a few numbers of each position and, for the block method, sums over the vocabulary.
Those are added up in blocks first; then every program that needs to know what is kept works it out for itself.
"""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _count(ids, Q: tl.constexpr, PADDED: tl.constexpr):
    """Drafts before the first negative id."""
    every = tl.arange(0, PADDED)
    negative = (every < Q) & (tl.load(ids + every, every < Q, 0) < 0)
    return tl.min(tl.where(negative, every, Q), 0)


@triton.jit
def _chance(draft, target, ids, i, draft_step, target_step, GREEDY: tl.constexpr):
    """A draft's probability when it was drawn, and the target's, fp64."""
    token = tl.load(ids + i)
    said = tl.load(target + i * target_step + token).to(tl.float64)
    if GREEDY:
        drawn = tl.full([], 1.0, tl.float64)
    else:
        drawn = tl.load(draft + i * draft_step + token).to(tl.float64)
    return drawn, said


@triton.jit
def _follow(p, draft, target, ids, i, draft_step, target_step, GREEDY: tl.constexpr):
    """The block method's probability of a prefix, one draft longer."""
    drawn, said = _chance(draft, target, ids, i, draft_step, target_step, GREEDY)
    return tl.minimum(p * (said / tl.maximum(drawn, 1e-300)), 1.0)


@triton.jit
def _left(draft, target, ids, i, mass, id, vocab, draft_step, target_step, GREEDY: tl.constexpr):
    """What the target has beyond the draft at position i, fp64; the target weighs `mass`."""
    said = tl.load(target + i * target_step + id, id < vocab, 0.0).to(tl.float64) * mass
    if GREEDY:
        drawn = tl.where(id == tl.load(ids + i), 1.0, 0.0).to(tl.float64)
    else:
        drawn = tl.load(draft + i * draft_step + id, id < vocab, 0.0).to(tl.float64)
    return tl.maximum(said - drawn, 0.0)


@triton.jit
def _residuals(
    ids, draft, target, sums, ids_stride, draft_stride, draft_step, target_stride, target_step, vocab, blocks,
    Q: tl.constexpr, PADDED: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row and a position but the last, a block's part of the residual after it."""
    row, i, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    ids += row * ids_stride
    draft += row * draft_stride
    target += row * target_stride
    if i + 1 < _count(ids, Q, PADDED):
        p = tl.full([], 1.0, tl.float64)
        for j in range(i + 1):
            p = _follow(p, draft, target, ids, j, draft_step, target_step, GREEDY)
        id = block * BLOCK + tl.arange(0, BLOCK)
        left = _left(draft, target, ids, i + 1, p, id, vocab, draft_step, target_step, GREEDY)
        tl.store(sums + (row * (Q - 1) + i) * blocks + block, tl.sum(left, 0))


@triton.jit
def _accept(
    ids, draft, target, sums, uniform, draft_step, target_step, blocks, count,
    GREEDY: tl.constexpr, BY_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of one row: the drafts kept, and the target's factor in the residual."""
    kept = tl.full([], 0, tl.int32)
    mass, p = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64)
    if BY_BLOCK:
        every = tl.arange(0, BLOCKS)
        for i in range(count):
            p = _follow(p, draft, target, ids, i, draft_step, target_step, GREEDY)
            threshold = p
            if i + 1 < count:
                residual = tl.sum(tl.load(sums + i * blocks + every, every < blocks, 0.0), 0)
                whole = residual + 1.0 - p
                threshold = tl.where(whole > 0, residual / tl.where(whole > 0, whole, 1.0), 1.0)
            taken = tl.load(uniform + i) < threshold
            kept = tl.where(taken, i + 1, kept)
            mass = tl.where(taken, p, mass)
    else:
        for i in range(count):
            drawn, said = _chance(draft, target, ids, i, draft_step, target_step, GREEDY)
            taken = (kept == i) & (tl.load(uniform + i) * drawn < said)
            kept = tl.where(taken, i + 1, kept)
    return kept, mass


@triton.jit
def _rest(
    ids, draft, target, sums, uniform, lefts, totals,
    ids_stride, draft_stride, draft_step, target_stride, target_step, uniform_stride, vocab, blocks,
    Q: tl.constexpr, PADDED: tl.constexpr, GREEDY: tl.constexpr, BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """A block's part of what the next token may be drawn from, and of the target should that be nothing."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids += row * ids_stride
    draft += row * draft_stride
    target += row * target_stride
    count = _count(ids, Q, PADDED)
    kept, mass = _accept(
        ids, draft, target, sums + row * (Q - 1) * blocks, uniform + row * uniform_stride,
        draft_step, target_step, blocks, count, GREEDY, BY_BLOCK, BLOCKS,
    )  # fmt: skip
    id = block * BLOCK + tl.arange(0, BLOCK)
    whole = tl.sum(tl.load(target + kept * target_step + id, id < vocab, 0.0).to(tl.float64), 0)
    left = whole
    if kept < count:
        left = tl.sum(_left(draft, target, ids, kept, mass, id, vocab, draft_step, target_step, GREEDY), 0)
    tl.store(lefts + row * blocks + block, left)
    tl.store(totals + row * blocks + block, whole)


@triton.jit
def _draw(
    ids, draft, target, sums, uniform, lefts, totals, accepted, following,
    ids_stride, draft_stride, draft_step, target_stride, target_step, uniform_stride, vocab, blocks,
    Q: tl.constexpr, PADDED: tl.constexpr, GREEDY: tl.constexpr, BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row's answer."""
    row = tl.program_id(0).to(tl.int64)
    ids += row * ids_stride
    draft += row * draft_stride
    target += row * target_stride
    uniform += row * uniform_stride
    count = _count(ids, Q, PADDED)
    kept, mass = _accept(
        ids, draft, target, sums + row * (Q - 1) * blocks, uniform, draft_step, target_step, blocks, count,
        GREEDY, BY_BLOCK, BLOCKS,
    )  # fmt: skip
    every = tl.arange(0, BLOCKS)
    parts = tl.load(lefts + row * blocks + every, every < blocks, 0.0)
    from_rest = (kept < count) & (tl.sum(parts, 0) > 0)
    if not from_rest:
        parts = tl.load(totals + row * blocks + every, every < blocks, 0.0)
    goal = tl.load(uniform + Q) * tl.sum(parts, 0)
    reached = tl.cumsum(parts, 0) > goal
    # Of blocks that weigh anything; rounding may leave the goal just beyond the last.
    last = tl.max(tl.where(parts > 0, every, 0), 0)
    block = tl.minimum(tl.min(tl.where(reached, every, BLOCKS), 0), last)
    before = tl.sum(tl.where(every < block, parts, 0.0), 0)
    lane = tl.arange(0, BLOCK)
    id = block * BLOCK + lane
    if from_rest:
        values = _left(draft, target, ids, kept, mass, id, vocab, draft_step, target_step, GREEDY)
    else:
        values = tl.load(target + kept * target_step + id, id < vocab, 0.0).to(tl.float64)
    here = before + tl.cumsum(values, 0) > goal
    last = tl.max(tl.where(values > 0, lane, 0), 0)
    place = tl.minimum(tl.min(tl.where(here, lane, BLOCK), 0), last)
    tl.store(accepted + row, kept.to(tl.int64))
    tl.store(following + row, (block * BLOCK + place).to(tl.int64))


def verify_draft(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniform: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    """See the operator. Vocabularies are contiguous."""
    (rows, drafts), vocab, device = draft_ids.shape, target_probs.shape[-1], draft_ids.device
    accepted, following = torch.empty((2, rows), dtype=torch.int64, device=device)
    if not rows:
        return accepted, following
    block = min(max(triton.next_power_of_2(vocab), 16), BLOCK)
    blocks, greedy, by_block = triton.cdiv(vocab, block), draft_probs is None, method == "block"
    sums = torch.empty((rows, max(drafts - 1, 1), blocks), dtype=torch.float64, device=device)
    lefts, totals = torch.empty((2, rows, blocks), dtype=torch.float64, device=device)
    given = target_probs if draft_probs is None else draft_probs
    strides = (draft_ids.stride(0), given.stride(0), given.stride(1), *target_probs.stride()[:2])
    sizes = (drafts, max(triton.next_power_of_2(drafts), 1), greedy)
    warps, padded = min(max(block // 512, 1), 8), triton.next_power_of_2(blocks)
    if by_block and drafts > 1:
        _residuals[(rows, drafts - 1, blocks)](
            draft_ids, given, target_probs, sums, *strides, vocab, blocks, *sizes, block, num_warps=warps
        )
    rest = (*strides, uniform.stride(0), vocab, blocks, *sizes, by_block, block, padded)
    _rest[(rows, blocks)](draft_ids, given, target_probs, sums, uniform, lefts, totals, *rest, num_warps=warps)
    _draw[(rows,)](
        draft_ids, given, target_probs, sums, uniform, lefts, totals, accepted, following, *rest, num_warps=warps
    )
    return accepted, following
