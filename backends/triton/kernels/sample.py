"""Sampling without sorting: three launches, whatever the rows ask for.

Blocks of a row find its largest and smallest logit; then count and weigh, in fp64, the tokens of BINS equal ranges of
values between them; then one program a row looks only into the ranges where a boundary falls. There are at most three
boundaries, found one after another: where top_k ends, where top_p ends, and the draw. Masses summed in another order
differ in their last bits, so the draw also ends at the last token that was kept, by number.
"""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, LISTED, BINS, LANES = 4096, 2048, 32, 256
TOP_K, TOP_P, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _survey(logits, tops, lows, bests, row_stride, vocab, blocks, BLOCK: tl.constexpr):
    """The largest logit of a block, the lowest id that has it, and the smallest finite one."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + id, id < vocab, -float("inf"))
    top = tl.max(values, 0)
    place = row * blocks + block
    tl.store(tops + place, top)
    tl.store(bests + place, tl.min(tl.where((values == top) & (id < vocab), id, vocab - 1), 0))
    tl.store(lows + place, tl.min(tl.where(values > -float("inf"), values, float("inf")), 0))


@triton.jit
def _extremes(tops, lows, row, blocks, BLOCKS: tl.constexpr):
    """A row's largest and smallest finite logit."""
    every = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(tops + row * blocks + every, every < blocks, -float("inf")), 0)
    return top, tl.min(tl.load(lows + row * blocks + every, every < blocks, float("inf")), 0)


@triton.jit
def _bin(values, top, low, BINS: tl.constexpr):
    """The range a logit is in, 0 the highest; -1 where it is masked. Halves, so that no difference overflows."""
    width = top * 0.5 - low * 0.5
    scale = tl.where(width > 0, BINS / tl.where(width > 0, width, 1.0), 0.0)
    there = values > -float("inf")
    distance = tl.minimum((top * 0.5 - tl.where(there, values, top) * 0.5) * scale, BINS - 1.0)
    return tl.where(there, distance.to(tl.int32), -1)


@triton.jit
def _weight(values, top, temperature):
    """`exp((logit - largest) / temperature)`, fp64; 0 where masked."""
    shifted = values.to(tl.float64) / temperature - top.to(tl.float64) / temperature
    return tl.where(values > -float("inf"), tl.exp(shifted), 0.0)


@triton.jit
def _weigh(
    logits, temperatures, min_p, tops, lows, counts, masses, row_stride, vocab, blocks,
    BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """How many tokens of a block are in each range and what they weigh; last, of all ranges, those that min_p keeps."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        top, low = _extremes(tops, lows, row, blocks, BLOCKS)
        least = tl.load(min_p + row).to(tl.float64)
        lane, bins = tl.arange(0, LANES), tl.arange(0, BINS)
        count, mass = tl.zeros([BINS, LANES], tl.int32), tl.zeros([BINS, LANES], tl.float64)
        likely, likely_mass = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.float64)
        for start in tl.range(0, BLOCK, LANES, num_stages=3):
            id = block * BLOCK + start + lane
            values = tl.load(logits + row * row_stride + id, id < vocab, -float("inf"))
            weight = _weight(values, top, temperature)
            here = _bin(values, top, low, BINS)[None, :] == bins[:, None]
            count += here.to(tl.int32)
            mass += tl.where(here, weight[None, :], 0.0)
            keeps = (weight >= least) & (values > -float("inf"))
            likely += keeps.to(tl.int32)
            likely_mass += tl.where(keeps, weight, 0.0)
        place = (row * blocks + block) * (BINS + 1)
        tl.store(counts + place + bins, tl.sum(count, 1))
        tl.store(masses + place + bins, tl.sum(mass, 1))
        tl.store(counts + place + BINS, tl.sum(likely, 0))
        tl.store(masses + place + BINS, tl.sum(likely_mass, 0))


@triton.jit
def _key(values):
    """Integers in the order of the logits; both zeros are one."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reached(count, mass, goal, target, HOW: tl.constexpr):
    """Whether tokens that many and that heavy, from the first on, include the boundary."""
    if HOW == TOP_K:
        reached = count >= goal
    elif HOW == TOP_P:
        reached = mass >= target
    else:
        reached = (mass > target) | (count >= goal)
    return reached


@triton.jit
def _list(logits, keys, ids, where, top, low, vocab, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Lists the tokens of a range in the order of ids: how many, their least and their largest key."""
    found = 0
    least, most = tl.full([BLOCK], 2147483647, tl.int32), tl.full([BLOCK], -2147483648, tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        id = start + tl.arange(0, BLOCK)
        values = tl.load(logits + id, id < vocab, -float("inf"))
        here = _bin(values, top, low, BINS) == where
        key = _key(values)
        place = found + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(keys + place, key, here)
        tl.store(ids + place, id, here)
        found += tl.sum(here.to(tl.int32), 0)
        least = tl.minimum(least, tl.where(here, key, 2147483647))
        most = tl.maximum(most, tl.where(here, key, -2147483648))
    return found, tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _sift(keys, ids, found, most, shift, where, begin, end, LANES: tl.constexpr):
    """From the list at `begin` to the one at `end` goes what is in one range of keys; as `_list`."""
    kept = 0
    least, largest = tl.full([LANES], 2147483647, tl.int32), tl.full([LANES], -2147483648, tl.int32)
    for start in range(0, found, LANES):
        at = start + tl.arange(0, LANES)
        key = tl.load(keys + begin + at, at < found, 0)
        here = (at < found) & (((most.to(tl.int64) - key) >> shift).to(tl.int32) == where)
        place = kept + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(keys + end + place, key, here)
        tl.store(ids + end + place, tl.load(ids + begin + at, at < found, 0), here)
        kept += tl.sum(here.to(tl.int32), 0)
        least = tl.minimum(least, tl.where(here, key, 2147483647))
        largest = tl.maximum(largest, tl.where(here, key, -2147483648))
    return kept, tl.min(least, 0), tl.max(largest, 0)


@triton.jit
def _place(count, mass, before, before_mass, goal, target, BINS: tl.constexpr, HOW: tl.constexpr):
    """The range that has the boundary, and how many tokens of what weight come before it."""
    bins = tl.arange(0, BINS)
    reached = _reached(before + tl.cumsum(count, 0), before_mass + tl.cumsum(mass, 0), goal, target, HOW)
    # Rounding may leave a target just beyond the last token that weighs anything.
    last = tl.max(tl.where(count > 0, bins, 0), 0)
    where = tl.minimum(tl.sum((reached == 0).to(tl.int32), 0), last)
    before += tl.sum(tl.where(bins < where, count, 0), 0)
    before_mass += tl.sum(tl.where(bins < where, mass, 0.0), 0)
    return where, before, before_mass


@triton.jit
def _boundary(
    logits, keys, ids, counts, masses, top, low, temperature, vocab, goal, target,
    BLOCK: tl.constexpr, BINS: tl.constexpr, LANES: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """How many tokens there are up to the boundary, what they weigh, and the last one's id.

    `counts` and `masses` [BINS] are the row's. The tokens in the range of the boundary are listed, and the list sifted
    by ever smaller ranges of keys until one key is left; which of the tokens with that key is arithmetic.
    """
    bins, lane = tl.arange(0, BINS), tl.arange(0, LANES)
    nothing = tl.zeros([], tl.float64)
    where, before, before_mass = _place(counts, masses, 0, nothing, goal, target, BINS, HOW)
    tl.debug_barrier()  # No list is overwritten while it is read.
    found, least, most = _list(logits, keys, ids, where, top, low, vocab, BLOCK, BINS)
    begin, end = tl.zeros([], tl.int64), tl.zeros([], tl.int64) + vocab
    while least < most:
        tl.debug_barrier()
        width, shift = most.to(tl.int64) - least, 0
        while (width >> shift) >= BINS:
            shift += 1
        count, mass = tl.zeros([BINS, LANES], tl.int32), tl.zeros([BINS, LANES], tl.float64)
        for start in range(0, found, LANES):
            key = tl.load(keys + begin + start + lane, start + lane < found, 0)
            range_of = tl.where(start + lane < found, ((most.to(tl.int64) - key) >> shift).to(tl.int32), -1)
            here = range_of[None, :] == bins[:, None]
            count += here.to(tl.int32)
            mass += tl.where(here, _weight(_value(key), top, temperature)[None, :], 0.0)
        where, before, before_mass = _place(
            tl.sum(count, 1), tl.sum(mass, 1), before, before_mass, goal, target, BINS, HOW
        )
        found, least, most = _sift(keys, ids, found, most, shift, where, begin, end, LANES)
        begin, end = end, begin
    tl.debug_barrier()
    each = _weight(_value(least), top, temperature)
    if HOW == TOP_K:
        nth = goal - before
    else:
        more = (target - before_mass) / tl.where(each > 0, each, 1.0)
        more = tl.minimum(tl.maximum(more, 0.0), vocab * 1.0)
        nth = tl.ceil(more).to(tl.int32) if HOW == TOP_P else tl.floor(more).to(tl.int32) + 1
    if HOW == DRAW:
        nth = tl.minimum(nth, goal - before)
    nth = tl.maximum(tl.minimum(nth, found), 1)
    return before + nth, before_mass + nth * each, tl.load(ids + begin + nth - 1)


@triton.jit
def _choose(
    logits, temperatures, top_k, top_p, uniform, tops, lows, bests, counts, masses, keys, ids, out,
    row_stride, vocab, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row's token."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, BLOCKS)
    top, low = _extremes(tops, lows, row, blocks, BLOCKS)
    temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        logits += row * row_stride
        keys += row * 2 * vocab
        ids += row * 2 * vocab
        bins = tl.arange(0, BINS)
        place = (row * blocks + every)[:, None] * WIDTH
        valid = (every < blocks)[:, None] & (bins < BINS)[None, :]
        count = tl.sum(tl.load(counts + place + bins[None, :], valid, 0), 0)
        mass = tl.sum(tl.load(masses + place + bins[None, :], valid, 0.0), 0)
        end = (row * blocks + every) * WIDTH + BINS
        likely = tl.sum(tl.load(counts + end, every < blocks, 0), 0)
        likely_mass = tl.sum(tl.load(masses + end, every < blocks, 0.0), 0)
        kept, kept_mass = tl.sum(count, 0), tl.sum(mass, 0)
        goal, share = tl.load(top_k + row), tl.load(top_p + row)
        nothing = tl.zeros([], tl.float64)
        if (goal > 0) & (goal < kept):
            kept, kept_mass, token = _boundary(
                logits, keys, ids, count, mass, top, low, temperature, vocab, goal, nothing, BLOCK, BINS, LANES, TOP_K
            )
        if share < 1:
            target = share.to(tl.float64) * kept_mass
            kept, kept_mass, token = _boundary(
                logits, keys, ids, count, mass, top, low, temperature, vocab, 0, target, BLOCK, BINS, LANES, TOP_P
            )
        if likely < kept:
            # The first token is always kept; it weighs 1.
            kept, kept_mass = tl.maximum(likely, 1), tl.where(likely > 0, likely_mass, 1.0)
        target = tl.load(uniform + row) * kept_mass
        kept, kept_mass, token = _boundary(
            logits, keys, ids, count, mass, top, low, temperature, vocab, kept, target, BLOCK, BINS, LANES, DRAW
        )
        tl.store(out + row, token.to(tl.int64))
    else:
        inside = every < blocks
        at_top = tl.load(tops + row * blocks + every, inside, -float("inf")) == top
        best = tl.load(bests + row * blocks + every, inside, 0)
        tl.store(out + row, tl.min(tl.where(inside & at_top, best, vocab - 1), 0).to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:  # fmt: skip
    """See the operator."""
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    block = min(max(triton.next_power_of_2(vocab), 16), BLOCK)
    blocks = triton.cdiv(vocab, block)
    tops, lows = torch.empty((2, rows, blocks), dtype=torch.float32, device=device)
    bests = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    counts = torch.empty((rows, blocks, BINS + 1), dtype=torch.int32, device=device)
    masses = torch.empty((rows, blocks, BINS + 1), dtype=torch.float64, device=device)
    keys, ids = torch.empty((2, rows, 2, vocab), dtype=torch.int32, device=device)
    lanes, padded = min(block, LANES), triton.next_power_of_2(blocks)
    grid, stride = (rows, blocks), logits.stride(0)
    _survey[grid](logits, tops, lows, bests, stride, vocab, blocks, block, num_warps=min(max(block // 512, 1), 8))
    _weigh[grid](
        logits, temperature, min_p, tops, lows, counts, masses, stride, vocab, blocks, block, lanes, padded, BINS,
        num_warps=8 if lanes == LANES else 1,
    )  # fmt: skip
    _choose[(rows,)](
        logits, temperature, top_k, top_p, uniform, tops, lows, bests, counts, masses, keys, ids, out,
        stride, vocab, blocks, min(block, LISTED), padded, BINS, BINS + 1, lanes, num_warps=8 if block == BLOCK else 1,
    )  # fmt: skip
    return out
