"""Sweep axes over what a call's operator has: heads, cached context, the cache's dtype, and where its state is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.batching import BATCHING, row_spans, select, take, units
from k3hal.debug.case import Case
from k3hal.debug.memory import GuardedCopy
from k3hal.dispatch.registry import get_operator
from k3hal.errors import UsageError

CACHE_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
STATES = ("given", "recomputed", "restored")
_STATE_NAMES = ("conv_state", "state")
_NO_PAGE = 1 << 30
_PROJECTIONS = {"qkv": (1, 3), "raw_gate": (1, 1), "beta_logits": (1, 1), "out_gate": (1, 1)}
_GATE = {"A_log": (0, 1), "dt_bias": (0, 1)}
_CACHES = {"conv_state": (2, 3), "state": (1, 1)}
_LAYER = {**_PROJECTIONS, **_GATE, **_CACHES, "conv_weight": (0, 3)}
_QKV: Mapping[str, tuple[int, int]] = dict.fromkeys(("q", "k", "v", "g", "beta", "state"), (1, 1))
HEADS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "gated_rms_norm": {"x": (1, 1), "gate": (1, 1)},
    "kda_chunk": _QKV,
    "kda_commit": {"u": (2, 1), "k": (2, 1), "raw_gate": (2, 1), "conv_in": (2, 3), **_GATE, **_CACHES},
    "kda_decode": _LAYER,
    "kda_gate": {"raw_gate": (1, 1), "beta_logits": (1, 1), **_GATE},
    "kda_prefill": _LAYER,
    "kda_recurrent": _QKV,
    "kda_verify": _LAYER,
    "mla_decode": {"q": (1, 1)},
    "mla_prefill": {"q": (1, 1), "w_uk": (0, 1), "w_uv": (0, 1)},
}
"""The arguments that hold heads: on which axis, and as how many parts (q, k and v of one projection are three)."""
CONTEXT = {"mla_decode": "seq_lens", "mla_prefill": "context_lens"}
"""The argument that says how many tokens are cached."""


def has_state(op: str) -> bool:
    """Whether calls of an operator read and write states in slots."""
    operator = get_operator(op)
    return "slots" in operator.parameters and bool(set(operator.mutates) & set(_STATE_NAMES))


def with_heads(case: Case, count: int) -> Case:
    """The case with that many heads, as another rank count gives; the case's own are repeated in order.

    Each repetition is scaled, so that no two heads are equal and one taken for another shows.
    """
    changes: dict[str, Tensor] = {}
    for name, (axis, parts) in HEADS[case.op].items():
        value = case.args[name]
        split = value.unflatten(axis, (parts, _heads(case), -1)) if parts > 1 else value
        at = axis + (parts > 1)
        have = split.shape[at]
        chosen = split.index_select(at, torch.arange(count) % have)
        factors = (1 + (torch.arange(count) // have) / 8).to(chosen.dtype)
        chosen = chosen * factors.view(-1, *[1] * (chosen.ndim - at - 1))
        changes[name] = chosen.flatten(axis, axis + 2) if parts > 1 else chosen
    return replace(case.with_args(f"heads{count}", **changes), dims={**case.dims, "heads": count})


def _heads(case: Case) -> int:
    value = case.args.get("raw_gate")
    return value.shape[HEADS[case.op]["raw_gate"][0]] if value is not None else int(case.dims["heads"] or 1)


def with_context(case: Case, length: int) -> Case:
    """The case with `length` tokens cached for each sequence that attends; cached rows are repeated in order.

    Pages are dealt out anew, in descending order; what belongs to no sequence is NaN.
    """
    cache, table, lengths = case.args["kv_cache"], case.args["page_table"], case.args[CONTEXT[case.op]]
    page_tokens, new = cache.shape[1], _new_tokens(case)
    rows = [_rows(cache, table[n], int(lengths[n]) + count) for n, count in enumerate(new)]
    source = max(rows, key=len, default=cache[:0].flatten(0, 1))
    if not len(source):
        return case
    attends = [count > 0 or (case.op == "mla_decode" and int(lengths[n]) > 0) for n, count in enumerate(new)]
    totals = [length + count if live else 0 for count, live in zip(new, attends, strict=True)]
    counts = [-(-total // page_tokens) for total in totals]
    order = list(range(sum(counts), 0, -1))
    pages = torch.empty(sum(counts) + 1, *cache.shape[1:], dtype=cache.dtype)
    pages.view(torch.uint8).fill_(0xFF)
    dealt = torch.full((len(new), max([*counts, 1])), _NO_PAGE, dtype=table.dtype)
    for n, (total, count) in enumerate(zip(totals, counts, strict=True)):
        mine, order = torch.tensor(order[:count], dtype=torch.int64), order[count:]
        dealt[n, :count] = mine.to(table.dtype)
        own = rows[n] if len(rows[n]) else source
        filled = pages[mine].flatten(0, 1)
        filled[:total] = own[torch.arange(total) % len(own)]
        pages[mine] = filled.view(count, *cache.shape[1:])
    changes = {CONTEXT[case.op]: torch.tensor([length if live else 0 for live in attends], dtype=lengths.dtype)}
    return case.with_args(f"context{length}", kv_cache=pages, page_table=dealt, **changes)


def _new_tokens(case: Case) -> list[int]:
    """Tokens of each sequence whose rows are cached beyond its context: a chunk's own."""
    if case.op == "mla_decode":
        return [0] * units(case)
    return [len(span) for span in row_spans(case)]


def _rows(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    return cache[pages[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def with_cache_dtype(case: Case, word: str) -> Case:
    """The case with its cache in the activations' dtype (`auto`), bf16 or fp8, each page where it was."""
    name = case.dtype if word == "auto" else CACHE_DTYPES[word]
    if name not in (case.dtype, CACHE_DTYPES["fp8"]):
        raise UsageError(f"--grid: kv={word} does not go with {case.dtype} activations", hint="--dtype bfloat16")
    cache = case.args["kv_cache"]
    elements = 1 + sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True)) if cache.numel() else 0
    buffer = torch.empty(elements, dtype=getattr(torch, name))
    buffer.view(torch.uint8).fill_(0xFF)
    cast = buffer.as_strided(cache.shape, cache.stride())
    cast.copy_(cache.to(buffer.dtype))
    return replace(case.with_args(f"kv_{word}", kv_cache=cast), dims={**case.dims, "kv_dtype": name})


def with_state(case: Case, origin: str) -> Case:
    """The case with its states as given, or a call that continues from states that the reference computed.

    `recomputed` is the second half of every sequence (of an operator of single steps: the same step once more) after
    the reference has run what comes before; `restored` is the same after the states were copied to other slots, as
    restoring a snapshot does, with NaN where they were.
    """
    if origin == "given":
        return case
    first, second = (case, case) if "cu_seqlens" not in case.args else _halves(case)
    before = GuardedCopy(first.args).args
    with torch.inference_mode():
        get_operator(case.op).reference(**before)
    changes = {name: before[name].clone() for name in _STATE_NAMES if name in before}
    if "has_state" in case.args:
        changes["has_state"] = torch.ones_like(second.args["has_state"])
    if origin == "restored":
        changes |= _moved(changes, second.args["slots"])
    return second.with_args(origin, **changes)


def _halves(case: Case) -> tuple[Case, Case]:
    """First and second halves of all sequences of two tokens or more that have a slot."""
    whole = [n for n, span in enumerate(row_spans(case)) if len(span) > 1 and int(case.args["slots"][n])]
    if not whole:
        raise UsageError(f"--grid: {case.name} has no sequence to continue", hint="choose another --sample")
    case = select(case, whole)
    spans = row_spans(case)
    return (
        _piece(case, [span[: len(span) // 2] for span in spans], "first"),
        _piece(case, [span[len(span) // 2 :] for span in spans], "second"),
    )


def _piece(case: Case, rows: list[range], name: str) -> Case:
    bounds = torch.tensor([0, *(len(span) for span in rows)]).cumsum(0).to(case.args["cu_seqlens"].dtype)
    flat = [row for span in rows for row in span]
    return case.with_args(name, **{n: take(case.args[n], flat) for n in BATCHING[case.op].rows}, cu_seqlens=bounds)


def _moved(changes: Mapping[str, Any], slots: Tensor) -> dict[str, Tensor]:
    """The states of live slots in new ones after all others, NaN where they were; the null slot stays."""
    out: dict[str, Tensor] = {}
    count, live = 0, slots[slots > 0].long()
    for name in _STATE_NAMES:
        if name in changes:
            moved = torch.cat((changes[name], changes[name][slots.long()]))
            moved[live] = torch.nan
            count, out[name] = len(changes[name]), moved
    fresh = torch.arange(count, count + len(slots), dtype=slots.dtype)
    return out | {"slots": torch.where(slots > 0, fresh, 0)}
