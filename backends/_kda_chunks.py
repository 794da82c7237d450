"""The gated delta rule in chunks, by torch on any device: within a chunk as matrix products, then through the state.

Lengths and slots are fetched to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from k3hal.dispatch.ops._kda import L2_EPS

CHUNK, OTHER_CHUNKS = 64, (16, 32, 128)
LOG2_E = 1.4426950408889634
TILE_ROWS = 1 << 11
"""Rows (tokens times heads) worked on at a time: bounds the scratch memory and keeps it near the cache."""


@dataclass(slots=True)
class _Run:
    """One sequence that has a slot and tokens."""

    slot: int
    start: int
    length: int
    known: bool


def in_chunks(
    length: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
) -> Tensor:
    """The operator in chunks of `length` tokens, a power of two.

    Sequences go through together, longest first, so that each step works on those still alive.
    """
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    runs = _live_runs(slots, cu_seqlens, has_state)
    if not runs:
        return out
    chunk = min(length, 1 << (runs[0].length - 1).bit_length())
    current = torch.stack([state[run.slot] if run.known else torch.zeros_like(state[run.slot]) for run in runs])
    budget = max(1, TILE_ROWS // (chunk * q.shape[1]))
    for alive, first, last in _tiles([-(-run.length // chunk) for run in runs], budget):
        rows, valid = _rows(runs[:alive], first * chunk, last * chunk, q.device)
        queries, keys, values, decays, strengths = (
            _chunks(x, rows, valid, alive, chunk) for x in (q, k, v, g, beta.unsqueeze(-1))
        )
        met = _within_chunks(queries, keys, decays, strengths)
        read = _scan(met, values, strengths, current[:alive].flatten(0, 1))
        read = read.unflatten(1, (alive, -1)).permute(1, 0, 3, 2, 4).reshape(-1, *v.shape[1:]).to(v.dtype)
        out.index_copy_(0, rows, read) if valid is None else out.index_copy_(0, rows[valid], read[valid])
    for run, final in zip(runs, current.unbind(0), strict=True):
        state[run.slot] = final
    return out


def _live_runs(slots: Tensor, cu_seqlens: Tensor, has_state: Tensor) -> list[_Run]:
    starts = cu_seqlens.tolist()
    runs = [
        _Run(slot, starts[n], starts[n + 1] - starts[n], known)
        for n, (slot, known) in enumerate(zip(slots.tolist(), has_state.tolist(), strict=True))
    ]
    return sorted((r for r in runs if r.slot and r.length), key=lambda r: -r.length)


def _tiles(counts: list[int], budget: int) -> Iterator[tuple[int, int, int]]:
    """Cut chunks 0..counts[n] of sequences (most chunks first) into (alive sequences, first chunk, end chunk)."""
    first, alive = 0, len(counts)
    while alive:
        last = min(counts[alive - 1], first + max(1, budget // alive))
        yield alive, first, last
        first = last
        while alive and counts[alive - 1] <= first:
            alive -= 1


def _rows(runs: list[_Run], first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Packed rows of tokens first..last of each sequence, [n * (last - first)], and which exist (None: all do)."""
    offsets = torch.arange(first, last, device=device)
    starts, lengths = (
        torch.tensor(x, device=device).unsqueeze(1) for x in ([r.start for r in runs], [r.length for r in runs])
    )
    rows = starts + torch.minimum(offsets, lengths - 1)
    if last <= runs[-1].length:
        return rows.flatten(), None
    return rows.flatten(), (offsets < lengths).flatten()


def _chunks(x: Tensor, rows: Tensor, valid: Tensor | None, sequences: int, chunk: int) -> Tensor:
    """Rows of x [T, H, D] as fp32 [chunks, sequences * H, chunk, D]; zero where no token exists.

    A zero token with decay exp(0) neither reads nor changes the state.
    """
    picked = x.index_select(0, rows)
    if valid is not None:
        picked[~valid] = 0
    split = picked.unflatten(0, (sequences, -1, chunk)).permute(1, 0, 3, 2, 4)
    return split.to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)


@dataclass(slots=True)
class _Chunks:
    """What chunks [G, B, C, ...] are to the states [B, V, K] they meet in turn; G_i is the decay from a chunk's start.

    `probes` [G, B, C, 2, K] keys and queries times exp G_i; `tails` [G, B, C, K] keys times the decay to the chunk's
    end; `keep` [G, B, 1, K] the whole chunk's decay; `keys_on_keys`, `queries_on_keys` [G, B, C, C] lower triangles.
    """

    probes: Tensor
    tails: Tensor
    keep: Tensor
    keys_on_keys: Tensor
    queries_on_keys: Tensor


def _within_chunks(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> _Chunks:
    dim = q.shape[-1]
    kq = torch.stack((k, q), -2)
    scale = unit_scale(kq)
    scale[..., 1, :] *= dim**-0.5
    kq.mul_(scale)
    # Decays are taken in base 2: exp is slow where its result underflows, exp2 is not.
    from_start, to_end, pairs = _decayed_products(kq.flatten(0, 1), g.flatten(0, 1) * LOG2_E)
    from_start, to_end, pairs = (x.unflatten(0, g.shape[:2]) for x in (from_start, to_end, pairs))
    grow = from_start.exp2_()
    return _Chunks(
        probes=kq * grow.unsqueeze(-2),
        tails=kq[..., 0, :] * to_end.exp2_(),
        keep=grow[..., -1:, :],
        keys_on_keys=pairs[..., 0, :] * beta,
        queries_on_keys=pairs[..., 1, :],
    )


def unit_scale(x: Tensor) -> Tensor:
    """`1 / sqrt(sum x^2 + 1e-6)` over the last axis of an fp32 tensor, kept as an axis of one."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()


def _decayed_products(kq: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k_i . k_j and q_i . k_j times 2^(G_i - G_j) for j < i (and j = i for q) within chunks.

    kq [P, C, 2, K], g [P, C, K]. Returns the sums of g from the chunk's start through each token, those after each
    token to the chunk's end, both [P, C, K], and the products [P, C, 2, C].
    Blocks double in size: at each size the upper half of a block meets its lower half, and the exponent splits at the
    boundary into two sums of g that are <= 0 and never taken as a difference. So nothing overflows for any decay, and
    no precision is lost to a strong decay outside the pair.
    """
    count, chunk, _, dim = kq.shape
    from_start, to_end, pairs = g.clone(), torch.zeros_like(g), kq.new_zeros(count, chunk, 2, chunk)
    size = 1
    while size < chunk:
        blocks = chunk // (2 * size)
        rows = kq.view(count, blocks, 2, size, 2, dim)
        heads, tails = from_start.view(count, blocks, 2, size, dim), to_end.view(count, blocks, 2, size, dim)
        later = rows[:, :, 1] * heads[:, :, 1].exp2().unsqueeze(-2)
        earlier = rows[:, :, 0, :, 0] * tails[:, :, 0].exp2()
        met = torch.bmm(later.view(-1, 2 * size, dim), earlier.view(-1, size, dim).transpose(1, 2))
        on_diagonal = pairs.view(count, blocks, 2 * size, 2, blocks, 2 * size).diagonal(0, 1, 4)
        on_diagonal[:, size:, :, :size] = met.view(count, blocks, size, 2, size).permute(0, 2, 3, 4, 1)
        tails[:, :, 0] += heads[:, :, 1, -1:]
        heads[:, :, 1] += heads[:, :, 0, -1:]
        size *= 2
    pairs[:, :, 1].diagonal(0, 1, 2).copy_(torch.linalg.vecdot(kq[:, :, 0], kq[:, :, 1]))
    return from_start, to_end, pairs


def _scan(chunks: _Chunks, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Take the states [B, V, K] through the chunks, in place; returns the outputs [G, B, C, V]."""
    read = torch.empty_like(v)
    for i in range(v.shape[0]):
        seen = torch.bmm(chunks.probes[i].flatten(1, 2), state.transpose(1, 2)).unflatten(1, (-1, 2))
        wanted = (v[i] - seen[:, :, 0]).mul_(beta[i])
        u = solved(chunks.keys_on_keys[i], wanted)
        torch.baddbmm(seen[:, :, 1], chunks.queries_on_keys[i], u, out=read[i])
        state.mul_(chunks.keep[i]).baddbmm_(u.transpose(1, 2), chunks.tails[i])
    return read


def solved(lower: Tensor, wanted: Tensor) -> Tensor:
    """x of `(I + L) x = wanted` [B, C, V], L [B, C, C] the part of `lower` below the diagonal, C a power of two.

    Where there is no substitution but the host's, the inverse is made of its blocks, which double in size: with A and D
    inverted, what is below them is -D L A. No power of L is taken, which grow where keys are alike.
    """
    if lower.device.type == "cpu":
        return torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)
    return torch.bmm(inverted(lower), wanted)


def inverted(lower: Tensor) -> Tensor:
    """The inverse of I + L, as of `solved`."""
    count, chunk = lower.shape[:2]
    out = torch.eye(chunk, dtype=lower.dtype, device=lower.device).repeat(count, 1, 1)
    size = 1
    while size < chunk:
        blocks = (count, chunk // (2 * size), 2 * size)
        parts = out.view(*blocks, *blocks[1:]).diagonal(0, 1, 3).permute(0, 3, 1, 2)
        below = lower.reshape(*blocks, *blocks[1:]).diagonal(0, 1, 3).permute(0, 3, 1, 2)[..., size:, :size]
        made = -(parts[..., size:, size:] @ below @ parts[..., :size, :size])
        parts[..., size:, :size] = made
        size *= 2
    return out
