"""Faults of writing new entries into the paged cache."""

from __future__ import annotations

from typing import Any

import torch

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

MLA_CACHE = Catalogue()
fault = MLA_CACHE.fault


@fault("mla_cache_insert")
def row_off_by_one(right: Right, args: Arguments) -> Any:
    """Rows go one place too far."""
    rows, last = args["rows"], args["kv_cache"].shape[0] * args["kv_cache"].shape[1] - 1
    return right(args, rows=torch.where((rows >= 0) & (rows < last), rows + 1, -1))


@fault("mla_cache_insert", first="padding")
def padding_wraps(right: Right, args: Arguments) -> Any:
    """A negative row wraps to the end of the cache."""
    right(args)
    if bool((args["rows"] < 0).any()):
        args["kv_cache"][-1, -1] = 0


@fault("mla_cache_insert", first="padding")
def padding_into_row_0(right: Right, args: Arguments) -> Any:
    """Padding is written to the null page."""
    right(args)
    if bool((args["rows"] < 0).any()):
        args["kv_cache"][0, 0] = 0


@fault("mla_cache_insert")
def pe_before_latent(right: Right, args: Arguments) -> Any:
    """An entry is written as [k_pe | latent]."""
    joined = torch.cat((args["k_pe"], args["latent"]), -1)
    rank = args["latent"].shape[1]
    return right(args, latent=joined[:, :rank].contiguous(), k_pe=joined[:, rank:].contiguous())


@fault("mla_cache_insert")
def pe_not_written(right: Right, args: Arguments) -> Any:
    """The kernel for 512 channels leaves the other 64."""
    before = args["kv_cache"].clone()
    right(args)
    rank = args["latent"].shape[1]
    args["kv_cache"][..., rank:] = before[..., rank:]


@fault("mla_cache_insert")
def pe_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The row stride of k_pe, a column slice of a fused projection, is ignored."""
    k_pe = args["k_pe"]
    return right(args, k_pe=k_pe.as_strided(k_pe.shape, (k_pe.shape[1], 1)))


@fault("mla_cache_insert", first="strided")
def pages_taken_as_packed_on_write(right: Right, args: Arguments) -> Any:
    """The page stride is ignored."""
    cache = args["kv_cache"]
    return right(args, kv_cache=cache.as_strided(cache.shape, torch.empty(cache.shape, device="meta").stride()))


@fault("mla_cache_insert", first="fp8")
def fp8_not_saturated(right: Right, args: Arguments) -> Any:
    """What is beyond 448 becomes NaN in the fp8 cache."""
    right(args)
    if args["kv_cache"].dtype is torch.float8_e4m3fn:
        cache = args["kv_cache"].float()
        args["kv_cache"].copy_(torch.where(cache.abs() >= 448, torch.nan, cache).to(torch.float8_e4m3fn))


@fault("mla_cache_insert", first="fp8")
def fp8_scaled(right: Right, args: Arguments) -> Any:
    """The fp8 cache gets a scale of its own, which the attention does not know."""
    if args["kv_cache"].dtype is not torch.float8_e4m3fn:
        return right(args)
    return right(args, latent=args["latent"] / 2)


@fault("mla_cache_insert", first="scattered")
def page_written_whole(right: Right, args: Arguments) -> Any:
    """A page that gets a row is cleared first: its other rows, another prompt's prefix, are lost."""
    for row in args["rows"].tolist():
        if row >= 0:
            args["kv_cache"][row // args["kv_cache"].shape[1]] = 0
    return right(args)
