"""Cuts the caches of a call down to the slots and pages it uses, so that a case does not hold a whole arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

GAP = 64
"""Elements between the rows of a cut cache whose rows were apart."""


def compact(op: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their caches gathered and the indices renumbered; everything else is the same object.

    Row 0 stays row 0, the other used rows follow in ascending order, and one row that nobody uses comes last. Rows that
    stood apart in memory still do, but closer. A cache that would not shrink is left alone.
    """
    cut = _CUTS.get(op)
    return cut(dict(args)) if cut else dict(args)


def _by_slots(args: dict[str, Any]) -> dict[str, Any]:
    caches = [name for name in ("conv_state", "state") if name in args]
    used = args["slots"].unique()
    used = used[used > 0]
    if all(len(used) + 2 >= args[name].shape[0] for name in caches):
        return args
    for name in caches:
        args[name] = _gathered(args[name], used)
    return args | {"slots": _renumbered(args["slots"], used)}


def _by_page_table(args: dict[str, Any]) -> dict[str, Any]:
    table, cache = args["page_table"], args["kv_cache"]
    if "seq_lens" in args:
        lengths = args["seq_lens"]
    else:
        new = args["cu_seqlens"][1:] - args["cu_seqlens"][:-1]
        lengths = torch.where(new > 0, args["context_lens"] + new, 0)
    pages = -(-lengths.long() // cache.shape[1])
    needed = torch.arange(table.shape[1], device=table.device) < pages.unsqueeze(1)
    used = table[needed].unique()
    used = used[used > 0]
    if len(used) + 2 >= cache.shape[0]:
        return args
    renumbered = torch.where(needed, _renumbered(table.where(needed, 0), used), table)
    width = max(1, int(pages.max())) if len(pages) else 1
    return args | {"kv_cache": _gathered(cache, used), "page_table": renumbered[:, :width].contiguous()}


def _by_cache_rows(args: dict[str, Any]) -> dict[str, Any]:
    rows, cache = args["rows"], args["kv_cache"]
    page = cache.shape[1]
    used = (rows[rows >= 0] // page).unique()
    used = used[used > 0]
    if len(used) + 2 >= cache.shape[0]:
        return args
    pages = _renumbered((rows // page).where(rows >= 0, 0), used)
    return args | {"kv_cache": _gathered(cache, used), "rows": torch.where(rows >= 0, pages * page + rows % page, rows)}


def _by_copies(args: dict[str, Any]) -> dict[str, Any]:
    used = torch.cat((args["src"], args["dst"])).unique()
    used = used[used > 0]
    if len(used) + 2 >= args["arena"].shape[0]:
        return args
    cut = {name: _renumbered(args[name], used) for name in ("src", "dst")}
    return args | {"arena": _gathered(args["arena"], used), **cut}


def _renumbered(index: Tensor, used: Tensor) -> Tensor:
    """0 stays 0, the i-th of the ascending `used` becomes i + 1."""
    found = torch.searchsorted(used.contiguous(), index.contiguous()).to(index.dtype) + 1
    return torch.where(index > 0, found, 0).to(index.dtype)


def _gathered(cache: Tensor, used: Tensor) -> Tensor:
    """Row 0, the used rows and one more of zeros, apart if the cache's rows are."""
    row = cache[0].numel()
    apart = cache.stride(0) > row
    count = len(used) + 2
    buffer = torch.zeros(count * (row + GAP * apart), dtype=cache.dtype, device=cache.device)
    out = buffer.as_strided((count, *cache.shape[1:]), (row + GAP * apart, *torch.empty(cache.shape[1:]).stride()))
    out[0] = cache[0]
    out[1:-1] = cache[used.long()]
    return out


_CUTS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(
        ("causal_conv1d", "kda_chunk", "kda_recurrent", "kda_prefill", "kda_decode", "kda_verify", "kda_commit"),
        _by_slots,
    ),
    "mla_prefill": _by_page_table,
    "mla_decode": _by_page_table,
    "mla_cache_insert": _by_cache_rows,
    "copy_pages": _by_copies,
}
