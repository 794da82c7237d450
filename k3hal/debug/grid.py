"""Sweep axes over a case: shapes, memory layouts and states that no sample may have, and ways to run it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.batching import BATCHING, row_spans, take, units
from k3hal.debug.case import Case
from k3hal.debug.grid_axes import (
    CACHE_DTYPES,
    CONTEXT,
    HEADS,
    STATES,
    has_state,
    with_cache_dtype,
    with_context,
    with_heads,
    with_state,
)
from k3hal.dispatch.registry import get_operator
from k3hal.errors import UsageError

GAP = 16
"""Elements between rows under `layout=strided`."""
LAYOUTS = ("dense", "strided", "offset")
MAX_VALUE, MAX_POINTS = 1 << 20, 10_000
"""The most a number of a grid may be, and the points it may have: beyond, a sweep never ends."""


def parse_grid(text: str) -> dict[str, tuple[Any, ...]]:
    """`tokens=1,64+-1;layout=dense,strided` as values by axis. Raises `UsageError` naming the piece."""
    out: dict[str, tuple[Any, ...]] = {}
    for piece in filter(None, (part.strip() for part in text.split(";"))):
        axis, sep, values = (word.strip() for word in piece.partition("="))
        if axis not in KNOWN_AXES or not sep or not values:
            raise UsageError(f"--grid: {piece!r} is not AXIS=VALUES", hint=f"axes are {', '.join(KNOWN_AXES)}")
        if axis in out:
            raise UsageError(f"--grid: the {axis} axis is given twice", hint=f"like {axis}=VALUE,VALUE")
        words = [word.strip() for word in values.split(",")]
        known = KNOWN_AXES[axis]
        out[axis] = tuple(n for word in words for n in _numbers(axis, word)) if known == NUMBERS else tuple(words)
        if isinstance(known, tuple) and (odd := set(words) - set(known)):
            raise UsageError(f"--grid: {axis} {min(odd)!r}", hint=f"it is {', '.join(known)}")
    if (points := math.prod(len(values) for values in out.values())) > MAX_POINTS:
        raise UsageError(f"--grid: {points} points are too many", hint=f"at most {MAX_POINTS}")
    return out


def _numbers(axis: str, word: str) -> range:
    """A number, a range `63..65`, or a tile edge and its neighbours `64+-1`."""
    sep = "+-" if "+-" in word else ".."
    pieces = word.split(sep)
    if len(pieces) > 2 or not all(piece.isdecimal() for piece in pieces):
        raise UsageError(f"--grid: {axis}={word!r}", hint=_NUMBERS_HINT)
    # By length first: a number of thousands of digits is not even read.
    if any(len(piece) > len(str(MAX_VALUE)) for piece in pieces):
        raise UsageError(f"--grid: {axis}={word[:40]!r} is too large", hint=f"numbers up to {MAX_VALUE}")
    first, last = int(pieces[0]), int(pieces[-1])
    found = range(first - last, first + last + 1) if sep == "+-" else range(first, last + 1)
    if not found or found[0] < 1:
        raise UsageError(f"--grid: {axis}={word!r}", hint=_NUMBERS_HINT)
    if found[-1] > MAX_VALUE:
        raise UsageError(f"--grid: {axis}={word!r} is too large", hint=f"numbers up to {MAX_VALUE}")
    if len(found) > MAX_POINTS:
        raise UsageError(f"--grid: {axis}={word!r} has {len(found)} points", hint=f"at most {MAX_POINTS}")
    return found


def axes_of(op: str) -> tuple[str, ...]:
    """The axes that calls of an operator can be swept over."""
    batching, parameters = BATCHING.get(op), get_operator(op).parameters
    has = {
        "tokens": batching is not None and batching.spans != "width",
        "batch": batching is not None,
        "layout": batching is not None and bool(batching.rows),
        "heads": op in HEADS,
        "context": op in CONTEXT,
        "kv": "kv_cache" in parameters,
        "state": has_state(op),
    }
    return tuple(axis for axis in KNOWN_AXES if has.get(axis, True))


def check_axes(op: str, grid: Mapping[str, Sequence[Any]]) -> None:
    """Raises `UsageError` for an axis that the operator does not have, naming those it has."""
    for axis in grid:
        if axis not in axes_of(op):
            raise UsageError(f"--grid: {op} has no {axis} axis", hint=f"it has {', '.join(axes_of(op))}")


def sweep(case: Case, grid: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """The case at every point of the grid's axes in `AXES`; nothing for a call without a row where rows are varied.

    Raises `UsageError` as `check_axes` does.
    """
    check_axes(case.op, grid)
    mine = {axis: grid[axis] for axis in AXES if axis in grid}
    if mine and not units(case) and case.op in BATCHING:
        return
    for point in itertools.product(*mine.values()):
        out = case
        for axis, value in zip(mine, point, strict=True):
            out = AXES[axis](out, value)
        yield out


def _tokens(case: Case, tokens: int) -> Case:
    """One sequence of that many tokens, or that many rows; rows are repeated in order where there are too few."""
    batching = BATCHING[case.op]
    if batching.spans == "one":
        return _batch(case, tokens)
    spans = row_spans(case)
    longest = max(range(len(spans)), key=lambda n: len(spans[n]))
    rows = [spans[longest][i % len(spans[longest])] for i in range(tokens)] if len(spans[longest]) else []
    if not rows:
        return case
    changes = {name: take(case.args[name], rows) for name in batching.rows if isinstance(case.args[name], Tensor)}
    changes |= {name: take(case.args[name], [longest]) for name in batching.sequences}
    if "context_lens" in changes:
        # A cache holds what it holds: the rows attended to end where they did.
        most = int(case.args["context_lens"][longest]) + len(spans[longest])
        if tokens > most:
            raise UsageError(f"--grid: {case.name} caches {most} tokens, not {tokens}", hint="choose another --sample")
        changes["context_lens"] = torch.full_like(changes["context_lens"], most - tokens)
    bounds = torch.tensor([0, tokens], dtype=case.args["cu_seqlens"].dtype)
    return case.with_args(f"tokens{tokens}", **changes, cu_seqlens=bounds)


def _batch(case: Case, count: int) -> Case:
    """That many sequences (or rows), the case's own repeated in order; each repeated one has a state of its own."""
    batching, have, spans = BATCHING[case.op], units(case), row_spans(case)
    chosen = [n % have for n in range(count)]
    rows = [row for unit in chosen for row in spans[unit]]
    changes = {name: take(case.args[name], rows) for name in batching.rows if isinstance(case.args[name], Tensor)}
    changes |= {name: take(case.args[name], chosen) for name in batching.sequences}
    changes |= {name: take(case.args[name], rows, 1).contiguous() for name in batching.columns}
    if "cu_seqlens" in case.args:
        totals = torch.tensor([0, *(len(spans[unit]) for unit in chosen)]).cumsum(0)
        changes["cu_seqlens"] = totals.to(case.args["cu_seqlens"].dtype)
    if "slots" in changes:
        old = changes["slots"].long()
        for name in ("conv_state", "state"):
            if name in case.args:
                changes[name] = torch.cat((case.args[name][:1], case.args[name][old]))
        fresh = torch.arange(1, count + 1, dtype=changes["slots"].dtype)
        changes["slots"] = torch.where(old > 0, fresh, 0)
    if case.op == "mla_cache_insert":
        # Two tokens may not go to one cache row.
        seen = torch.arange(count) < have
        changes["rows"] = torch.where(seen, changes["rows"], -1)
    return case.with_args(f"batch{count}", **changes)


def _layout(case: Case, layout: str) -> Case:
    """Row arguments dense, with gaps between rows, or one element into their memory."""
    if layout == "dense":
        return case
    names = (name for name in BATCHING[case.op].rows if _spreads(case.args[name]))
    return case.with_args(layout, **{name: _placed(case.args[name], layout) for name in names})


def _spreads(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.numel() > 0


def _placed(value: Tensor, layout: str) -> Tensor:
    row = value[0].numel()
    pitch, first = (row + GAP, 0) if layout == "strided" else (row, 1)
    buffer = torch.full((first + value.shape[0] * pitch,), 0, dtype=value.dtype)
    buffer.view(torch.uint8).fill_(0xFF)
    inner = torch.empty(value.shape[1:], device="meta").stride()
    out = buffer.as_strided(value.shape, (pitch, *inner), first)
    return out.copy_(value)


AXES: Mapping[str, Callable[[Case, Any], Case]] = {
    "state": with_state,
    "heads": with_heads,
    "context": with_context,
    "tokens": _tokens,
    "batch": _batch,
    "kv": with_cache_dtype,
    "layout": _layout,
}
"""Axes that change a case, in the order in which they do: layouts last, since what comes before makes new tensors."""
NUMBERS = "numbers"
_NUMBERS_HINT = "numbers from 1 on, like 1,7,63..65 or 64+-1"
KNOWN_AXES: Mapping[str, str | tuple[str, ...]] = {
    "tokens": NUMBERS,
    "batch": NUMBERS,
    "heads": NUMBERS,
    "context": NUMBERS,
    "layout": LAYOUTS,
    "kv": ("auto", *CACHE_DTYPES),
    "state": STATES,
    "tactic": "names",
    "mode": ("eager", "graph"),
    "start": ("warm", "cold"),
}
"""All axes with their values; the last three are ways to run a case (`grid_runs`)."""
