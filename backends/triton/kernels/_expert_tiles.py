"""Choices sorted by expert, on the device: a tile is up to BT choices of one expert.

A choice is `t * k + j`. Of tile i, `experts[i]` is the expert, negative for a tile that is not used, and
`rows[i * BT : (i + 1) * BT]` are its choices in ascending order, then -1. Neither what is in a tile nor where it lies
affects a number: every choice is a row of its own.
"""

# Triton types a sum as what may be a tuple.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels.programs import jit_for_any


@triton.jit
def expert_of(ids, stride, choice, live, TOP_K: tl.constexpr):
    """The experts of choices, -1 for those that are not live."""
    return tl.load(ids + (choice // TOP_K).to(tl.int64) * stride + choice % TOP_K, live, -1)


@jit_for_any("choices")
def tiles_of_few(ids, experts, rows, stride, choices, TOP_K: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr):
    """A program a choice; every BT-th choice of an expert leads a tile, which has the choice's own number."""
    me = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    every = expert_of(ids, stride, at, at < choices, TOP_K)
    mine = tl.load(ids + (me // TOP_K).to(tl.int64) * stride + me % TOP_K)
    same = ((every == mine) & (mine >= 0)).to(tl.int32)
    rank = tl.sum(tl.where(at < me, same, 0))
    leads = (mine >= 0) & (rank % BT == 0)
    tl.store(experts + me, tl.where(leads, mine, -1))
    # Nothing is stored where `size` is 0. (The interpreter takes no scalar in a mask.)
    size = tl.where(leads, BT, 0)
    place = tl.cumsum(same, 0) - 1 - rank
    taken = (same > 0) & (place >= 0) & (place < size)
    tl.store(rows + me * BT + place, at, taken)
    slot = tl.arange(0, BT)
    tl.store(rows + me * BT + slot, -1, (slot >= tl.sum(taken.to(tl.int32))) & (slot < size))


@jit_for_any("choices")
def count_choices(ids, counts, stride, choices, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """A program an expert: how many choices are its own."""
    me = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(0, choices, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += (expert_of(ids, stride, at, at < choices, TOP_K) == me).to(tl.int32)
    tl.store(counts + me, tl.sum(total))


@jit_for_any("choices", "tiles")
def tiles_of_many(
    ids, counts, experts, rows, stride, choices, tiles, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program an expert: its tiles follow those of the experts below. One more program: the tiles left over."""
    me = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_BLOCK)
    count = tl.load(counts + expert, expert < EXPERTS, 0)
    first = tl.sum(tl.where(expert < me, (count + BT - 1) // BT, 0))
    mine = tl.sum(tl.where(expert == me, count, 0))
    used = tl.where(me == EXPERTS, tiles - first, (mine + BT - 1) // BT)
    for a in range(0, used, BT):
        tile = a + tl.arange(0, BT)
        tl.store(experts + first + tile, tl.where(me == EXPERTS, -1, me), tile < used)
    if mine == 0:
        return
    slot = tl.arange(0, BT)
    tl.store(rows + (first + used - 1) * BT + slot, -1, (used - 1) * BT + slot >= mine)
    seen = 0
    for start in range(0, choices, BLOCK):
        at = start + tl.arange(0, BLOCK)
        same = (expert_of(ids, stride, at, at < choices, TOP_K) == me).to(tl.int32)
        tl.store(rows + first * BT + seen + tl.cumsum(same, 0) - 1, at, same > 0)
        seen += tl.sum(same)
