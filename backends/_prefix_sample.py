"""Sampling on the CPU, in fp64: the ordered prefix of the vocabulary, or all of it where that must be."""

from __future__ import annotations

import torch
from torch import Tensor

# Of a large vocabulary only this many best tokens are put in order, unless the draw falls beyond them.
PREFIX = 1024
FULL_SORT = 4096


def _ordered(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best logits of each row in descending order, ties by id, and their ids."""
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn with the `count` best in order, and whether each is certain, bool [R]; columns are [R, 1]."""
    values, ids = _ordered(logits, count)
    scaled, complete = values.double() / temperature, count == logits.shape[1]
    p = (scaled - scaled[:, :1]).exp_()
    mass = p if complete else (logits.double() / temperature - scaled[:, :1]).exp_()
    limit = torch.where(top_k > 0, top_k, logits.shape[1])
    p.masked_fill_(torch.arange(count) >= limit, 0.0)
    total = torch.where(limit < logits.shape[1], p.sum(dim=-1, keepdim=True), mass.sum(dim=-1, keepdim=True))
    p /= total
    cumulative = p.cumsum(dim=-1)
    keep = (cumulative - p < top_p) | (top_p >= 1)
    keep &= p >= min_p * p[:, :1]
    keep[:, 0] = True
    open_ended = (top_p >= 1) & (min_p <= 0) & (limit >= logits.shape[1])
    cumulative = (p * keep).cumsum_(dim=-1)
    kept = torch.where(open_ended & (not complete), 1.0, cumulative[:, -1:])
    drawn = (cumulative <= uniform * kept).sum(dim=-1, keepdim=True)
    inside = drawn < count
    drawn = drawn.clamp_(max=count - 1)
    # Beyond the prefix lie unknown tokens. Either top_k ends before them, or it is off and none of them is kept (or all
    # are, whose sum is known); and none may be tied with the one drawn.
    settled = (limit <= count) | ((limit >= logits.shape[1]) & (open_ended | ~keep[:, -1:]))
    certain = inside & settled & (values.gather(1, drawn) > values[:, -1:])
    return ids.gather(1, drawn)[:, 0], certain[:, 0] | complete


def drawn(
    out: Tensor,
    rows: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """`out` int64 [R] with the tokens of `rows`, none of which has temperature 0, drawn as `sample` says."""
    count = logits.shape[1] if logits.shape[1] <= FULL_SORT else PREFIX
    columns = (temperature.double(), top_k, top_p.double(), min_p.double(), uniform)
    while rows.numel():
        chosen = (column.index_select(0, rows)[:, None] for column in columns)
        tokens, certain = _draw(logits.index_select(0, rows), *chosen, count)
        out[rows] = torch.where(certain, tokens, out[rows])
        rows, count = rows[~certain], logits.shape[1]
    return out
