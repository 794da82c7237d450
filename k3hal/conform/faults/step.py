"""Faults of a step's bookkeeping: packed positions and page copies."""

from __future__ import annotations

from typing import Any

import torch

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

STEP = Catalogue()
fault = STEP.fault


@fault("copy_pages", first="chain")
def reads_after_writes(right: Right, args: Arguments) -> Any:
    """Pages are copied one after another: a chain carries the first page to its end."""
    for src, dst in zip(args["src"].tolist(), args["dst"].tolist(), strict=True):
        args["arena"][dst] = args["arena"][src].clone()


@fault("copy_pages", first="swap")
def tail_bytes_left(right: Right, args: Arguments) -> Any:
    """Pages are copied in words of 16 bytes, the rest is left."""
    before = args["arena"].clone()
    right(args)
    whole = before.shape[1] // 16 * 16
    args["arena"][:, whole:] = before[:, whole:]


@fault("copy_pages")
def source_and_target_swapped(right: Right, args: Arguments) -> Any:
    """Copies go from dst to src."""
    return right(args, src=args["dst"], dst=args["src"])


@fault("copy_pages")
def last_copy_left_out(right: Right, args: Arguments) -> Any:
    """The grid is one copy short."""
    return right(args, src=args["src"][:-1], dst=args["dst"][:-1])


@fault("copy_pages", first="fan_out")
def page_moved(right: Right, args: Arguments) -> Any:
    """The source is cleared after the copy, as a move would."""
    right(args)
    gone = args["src"][~torch.isin(args["src"], args["dst"])]
    args["arena"][gone] = 0


@fault("copy_pages", first="strided")
def rows_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The row stride of the arena is ignored."""
    arena = args["arena"]
    return right(args, arena=arena.as_strided(arena.shape, (arena.shape[1], 1)))


@fault("copy_pages", first="many")
def grid_of_64(right: Right, args: Arguments) -> Any:
    """At most 64 pages are copied at once."""
    return right(args, src=args["src"][:64], dst=args["dst"][:64])


@fault("step_metadata")
def positions_from_one(right: Right, args: Arguments) -> Any:
    """Positions count from 1."""
    positions, rows, bounds, lengths = right(args)
    return torch.where(rows >= 0, positions + 1, positions), rows, bounds, lengths


@fault("step_metadata")
def positions_of_the_chunk(right: Right, args: Arguments) -> Any:
    """Positions count from the chunk's start."""
    wrong = right(args, context_lens=torch.zeros_like(args["context_lens"]))[0]
    return (wrong, *right(args)[1:])


@fault("step_metadata", first="page_edges")
def page_edge_off_by_one(right: Right, args: Arguments) -> Any:
    """The first row of a page is looked for in the page before."""
    positions, rows, bounds, lengths = right(args)
    edge = (rows >= 0) & (positions % args["page_tokens"] == 0) & (positions > 0)
    return positions, torch.where(edge, rows - 1, rows), bounds, lengths


@fault("step_metadata", first="empty")
def padding_in_row_0(right: Right, args: Arguments) -> Any:
    """Padding tokens point to cache row 0."""
    positions, rows, bounds, lengths = right(args)
    return positions, rows.clamp_min(0), bounds, lengths


@fault("step_metadata", first="empty")
def padding_unwritten(right: Right, args: Arguments) -> Any:
    """Padding tokens keep what the step before left."""
    positions, rows, bounds, lengths = right(args)
    stale = torch.empty_like(positions)
    return torch.where(rows >= 0, positions, stale), rows, bounds, lengths


@fault("step_metadata")
def length_without_new_tokens(right: Right, args: Arguments) -> Any:
    """seq_lens does not count the new tokens."""
    return (*right(args)[:3], args["context_lens"].clone())


@fault("step_metadata")
def offsets_not_summed(right: Right, args: Arguments) -> Any:
    """cu_seqlens holds the lengths themselves."""
    positions, rows, bounds, lengths = right(args)
    return positions, rows, torch.cat((bounds[:1], bounds.diff())), lengths


@fault("step_metadata", first="large_pages")
def row_in_32_bits(right: Right, args: Arguments) -> Any:
    """page * page_tokens is taken in 32 bits."""
    positions, rows, bounds, lengths = right(args)
    return positions, rows.int().long(), bounds, lengths


@fault("step_metadata")
def page_table_of_the_first(right: Right, args: Arguments) -> Any:
    """All sequences use the first one's page table."""
    table = args["page_table"]
    return right(args, page_table=table[:1].expand(table.shape).contiguous() if len(table) else table)
