"""Faults of MLA attention over the paged cache: scores, masks, pages, and merged parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

MLA = Catalogue()
fault = MLA.fault
BOTH = ("mla_prefill", "mla_decode")


def lengths_of(args: Arguments) -> Tensor:
    """Rows each sequence attends to, int32 [N]; 0 where it has no query."""
    if "seq_lens" in args:
        return args["seq_lens"]
    new = args["cu_seqlens"].diff()
    return torch.where(new > 0, args["context_lens"] + new, 0)


@fault(*BOTH)
def pe_channels_dropped(right: Right, args: Arguments) -> Any:
    """The 64 channels that are never rotated are not scored either."""
    rope = args["kv_cache"].shape[2] - (args["kv_lora"] if "kv_lora" in args else args["w_uk"].shape[2])
    q = args["q"].clone()
    q[..., -rope:] = 0
    return right(args, q=q)


@fault(*BOTH)
def scale_of_the_latent(right: Right, args: Arguments) -> Any:
    """The scale is that of the cached width, 576^-0.5."""
    return right(args, scale=args["kv_cache"].shape[2] ** -0.5)


@fault(*BOTH)
def scale_missing(right: Right, args: Arguments) -> Any:
    """Scores are not scaled."""
    return right(args, scale=1.0)


@fault(*BOTH)
def pages_of_the_first(right: Right, args: Arguments) -> Any:
    """All sequences read through the first one's page table."""
    table = args["page_table"]
    first = int(lengths_of(args).argmax()) if len(table) else 0
    return right(args, page_table=table[first : first + 1].expand(table.shape).contiguous() if len(table) else table)


@fault(*BOTH)
def page_of_the_neighbour(right: Right, args: Arguments) -> Any:
    """The last page is read from the one before it in memory."""
    table = args["page_table"].clone()
    for n, length in enumerate(lengths_of(args).tolist()):
        if length:
            table[n, (length - 1) // args["kv_cache"].shape[1]] -= 1
    return right(args, page_table=table)


@fault(*BOTH, first="strided")
def pages_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The page stride of an arena of several layers is ignored."""
    cache = args["kv_cache"]
    return right(args, kv_cache=cache.as_strided(cache.shape, torch.empty(cache.shape, device="meta").stride()))


@fault(*BOTH)
def pages_taken_in_order(right: Right, args: Arguments) -> Any:
    """A sequence's pages are taken to follow its first."""
    table = args["page_table"]
    last = args["kv_cache"].shape[0] - 1
    order = (table[:, :1] + torch.arange(table.shape[1], dtype=table.dtype)).clamp_max(last)
    return right(args, page_table=torch.where(lengths_of(args)[:, None] > 0, order, table))


@fault("mla_decode", first="page_edges")
def full_page_not_counted(right: Right, args: Arguments) -> Any:
    """Pages are length // page + 1 less one: the last row of an exactly full page is lost."""
    lengths = args["seq_lens"]
    full = (lengths % args["kv_cache"].shape[1] == 0) & (lengths > 0)
    return right(args, seq_lens=lengths - full.int())


@fault("mla_decode")
def newest_row_not_seen(right: Right, args: Arguments) -> Any:
    """The token does not attend to itself: its row is taken as not cached yet."""
    lengths = args["seq_lens"]
    return right(args, seq_lens=torch.where(lengths > 1, lengths - 1, lengths))


@fault("mla_decode")
def one_row_too_many(right: Right, args: Arguments) -> Any:
    """The row after the last is attended to."""
    page = args["kv_cache"].shape[1]
    longer = torch.where((args["seq_lens"] % page != 0), args["seq_lens"] + 1, args["seq_lens"])
    return right(args, seq_lens=longer.int())


@fault("mla_decode", first="empty_rows")
def empty_rows_unwritten(right: Right, args: Arguments) -> Any:
    """Rows of length 0 are skipped: the result holds what the allocator gave."""
    out = right(args)
    wrong = torch.empty_like(out)
    wrong[args["seq_lens"] > 0] = out[args["seq_lens"] > 0]
    return wrong


@fault("mla_decode", first="empty_rows")
def empty_rows_attend(right: Right, args: Arguments) -> Any:
    """A row of length 0 is rounded up to one tile and reads the null page."""
    out = right(args)
    return torch.where((args["seq_lens"] == 0)[:, None, None], torch.nan, out)


@fault(*BOTH, first="fp8")
def fp8_read_as_e5m2(right: Right, args: Arguments) -> Any:
    """fp8 cache bytes are read in the other fp8 format."""
    cache = args["kv_cache"]
    if cache.dtype is not torch.float8_e4m3fn:
        return right(args)
    return right(args, kv_cache=cache.view(torch.float8_e5m2).float().to(args["q"].dtype))


def _parts(scores: Tensor, split: int) -> tuple[Tensor, Tensor]:
    return scores[..., :split], scores[..., split:]


def _split_softmax(scores: Tensor, *, by_max: bool, by_sum: bool) -> Tensor:
    """Softmax of two halves merged by their sums of exponentials, each over its own maximum. Without `by_max` the
    maxima are not brought together; without `by_sum` the halves are averaged."""
    parts = [p for p in _parts(scores, (scores.shape[-1] + 1) // 2) if p.shape[-1]]
    tops = [p.amax(-1, keepdim=True).clamp_min(-1e30) for p in parts]
    exps = [(p - top).exp() for p, top in zip(parts, tops, strict=True)]
    sums = [e.sum(-1, keepdim=True) for e in exps]
    most = torch.stack(tops).amax(0)
    lift = [(top - most).exp() if by_max else torch.ones_like(top) for top in tops]
    if by_sum:
        total = sum(s * f for s, f in zip(sums, lift, strict=True))
        return torch.cat([e * f / total for e, f in zip(exps, lift, strict=True)], dim=-1)
    share = [(s > 0).double() for s in sums]
    count = sum(share)
    return torch.cat([e / s.clamp_min(1e-30) * w / count for e, s, w in zip(exps, sums, share, strict=True)], -1)


def _attention(args: Arguments, softmax: Callable[[Tensor], Tensor], diagonal: int = 0) -> Tensor:
    """Both operators' definition with another softmax or another diagonal of the mask, in fp32."""
    q, decode = args["q"].float(), "seq_lens" in args
    rank = args["kv_lora"] if decode else args["w_uk"].shape[2]
    out = torch.zeros(*q.shape[:2], rank if decode else args["w_uv"].shape[1])
    bounds = list(range(q.shape[0] + 1)) if decode else args["cu_seqlens"].tolist()
    page = args["kv_cache"].shape[1]
    for n, length in enumerate(lengths_of(args).tolist()):
        if not length:
            continue
        chunk = q[bounds[n] : bounds[n + 1]]
        pages = args["page_table"][n, : -(-length // page)].long()
        rows = args["kv_cache"][pages].float().flatten(0, 1)[:length]
        if not decode:
            nope = args["w_uk"].shape[1]
            absorbed = torch.einsum("thd,hdr->thr", chunk[..., :nope], args["w_uk"].float())
            chunk = torch.cat((absorbed, chunk[..., nope:]), -1)
        scores = torch.einsum("the,le->htl", chunk, rows) * args["scale"]
        own = torch.arange(length - chunk.shape[0], length)[:, None] + diagonal
        weights = softmax(scores.masked_fill(torch.arange(length) > own.clamp_min(0), -torch.inf)).float()
        value = torch.einsum("htl,lr->thr", weights, rows[:, :rank])
        if not decode:
            value = torch.einsum("thr,hvr->thv", value, args["w_uv"].float())
        out[bounds[n] : bounds[n + 1]] = value
    return out.to(args["q"].dtype)


def _add(name: str, bug: str, softmax: Callable[[Tensor], Tensor], first: str = "", diagonal: int = 0) -> None:
    for op in BOTH if not diagonal else BOTH[:1]:
        MLA.add(name, op, bug, lambda right, args: _attention(args, softmax, diagonal), first)


_add(
    "parts_merged_without_max",
    "Two parts of the cache are merged by their sums, each over its own maximum",
    lambda s: _split_softmax(s, by_max=False, by_sum=True),
)
_add("parts_averaged", "Two parts of the cache are averaged", lambda s: _split_softmax(s, by_max=True, by_sum=False))
_add("exp_without_max", "exp of a score without its maximum", lambda s: s.exp() / s.exp().sum(-1, keepdim=True), "hot")
_add("softmax_in_base_2", "exp2 of natural scores: log2(e) is missing", lambda s: (s * 0.6931472).softmax(-1))
_add("sum_in_bf16", "The weights are summed in bf16", lambda s: _summed_in_bf16(s), "long")
_add("mask_hides_self", "A token does not see itself", lambda s: s.softmax(-1), diagonal=-1)
_add("mask_shows_next", "A token sees the next one of its chunk", lambda s: s.softmax(-1), diagonal=1)


def _summed_in_bf16(scores: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros(*weights.shape[:-1], 1, dtype=torch.bfloat16)
    for part in weights.split(64, -1):
        total = total + part.sum(-1, keepdim=True).bfloat16()
    return weights / total.float()


@fault("mla_prefill")
def mask_from_the_chunk(right: Right, args: Arguments) -> Any:
    """The causal mask counts from the chunk's start and hides the context behind it."""
    return right(args, context_lens=torch.zeros_like(args["context_lens"]))


@fault("mla_prefill", first="two")
def context_seen_by_none(right: Right, args: Arguments) -> Any:
    """The part of the output over the cached context is dropped when parts are merged."""
    softmax = lambda s: s.masked_fill(_context_of(s), -torch.inf).softmax(-1)  # noqa: E731
    return _attention(args, softmax)


def _context_of(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1]) < scores.shape[-1] - scores.shape[-2]


@fault("mla_prefill", first="page_edges")
def mask_off_by_one_after_context(right: Right, args: Arguments) -> Any:
    """With a cached context every token sees one row less: the chunk boundary is counted twice."""
    shorter = (args["context_lens"] - 1).clamp_min(0)
    return right(args, context_lens=shorter)


@fault("mla_prefill", first="empty_sequences")
def empty_sequences_skipped(right: Right, args: Arguments) -> Any:
    """Empty sequences are dropped from the offsets and not from the page table: later ones read a neighbour's."""
    kept = args["cu_seqlens"].unique()
    count = len(kept) - 1
    if count == len(args["context_lens"]) or not count:
        return right(args)
    table = args["page_table"][:count].clamp_max(args["kv_cache"].shape[0] - 1)
    return right(args, cu_seqlens=kept, page_table=table, context_lens=args["context_lens"][:count])


@fault("mla_prefill", first="padding")
def padding_rows_unwritten(right: Right, args: Arguments) -> Any:
    """Rows after the last sequence are left as the allocator gave them."""
    out, end = right(args), int(args["cu_seqlens"][-1])
    wrong = torch.empty_like(out)
    wrong[:end] = out[:end]
    return wrong


@fault("mla_prefill")
def values_of_the_first_head(right: Right, args: Arguments) -> Any:
    """All heads take the first one's w_uv."""
    return right(args, w_uv=args["w_uv"][:1].expand_as(args["w_uv"]).contiguous())


@fault("mla_prefill")
def keys_of_the_first_head(right: Right, args: Arguments) -> Any:
    """All heads take the first one's w_uk."""
    return right(args, w_uk=args["w_uk"][:1].expand_as(args["w_uk"]).contiguous())


@fault("mla_prefill")
def pe_before_nope(right: Right, args: Arguments) -> Any:
    """A head's query is read as [pe | nope]."""
    rope = args["q"].shape[2] - args["w_uk"].shape[1]
    return right(args, q=args["q"].roll(-rope, 2))


@fault("mla_prefill", first="long_chunk")
def rows_lost_after_1024(right: Right, args: Arguments) -> Any:
    """A grid of tiles limited to 1,024 queries a sequence."""
    out, bounds = right(args), args["cu_seqlens"].tolist()
    for a, b in itertools.pairwise(bounds):
        out[a + 1024 : b] = 0
    return out


@fault("mla_decode", first="many")
def batch_of_64_at_most(right: Right, args: Arguments) -> Any:
    """A grid limited to 64 sequences."""
    out = right(args)
    out[64:] = 0
    return out


@fault("mla_decode", first="long")
def splits_of_16k_at_most(right: Right, args: Arguments) -> Any:
    """The workspace holds the splits of 16,384 rows: what is beyond is not attended to."""
    return right(args, seq_lens=args["seq_lens"].clamp_max(16_384))
