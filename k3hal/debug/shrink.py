"""Makes a failing case smaller while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from k3hal.debug.batching import BATCHING, row_spans, select, take, units
from k3hal.debug.case import Case
from k3hal.debug.compact import compact


def shrink(case: Case, fails: Callable[[Case], bool], *, limit: int = 60) -> Case:
    """The smallest case found that still `fails`, by leaving out sequences or rows, then tokens, then unused cache.

    `fails` is asked at most `limit` times.
    """
    left = limit

    def try_one(candidate: Case) -> bool:
        nonlocal left
        left -= 1
        return fails(candidate)

    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(case):
            if left <= 0:
                break
            if try_one(candidate):
                case, smaller = candidate, True
                break
    cut = case.with_args("compact", **compact(case.op, case.args))
    return cut if cut.nbytes < case.nbytes and fails(cut) else case


def _smaller(case: Case) -> Iterator[Case]:
    """Halves of the units, then all but one; then halves of each remaining sequence's tokens."""
    count = units(case)
    if count > 1:
        half = count // 2
        yield select(case, range(half))
        yield select(case, range(half, count))
        if count <= 8:
            for left_out in range(count):
                yield select(case, [n for n in range(count) if n != left_out])
    if count == 1 and BATCHING[case.op].spans == "cu_seqlens":
        tokens = len(row_spans(case)[0])
        for keep in dict.fromkeys((tokens // 2, tokens - 1)):
            if 0 < keep < tokens:
                yield first_tokens(case, keep)


def first_tokens(case: Case, tokens: int) -> Case:
    """A case of one sequence cut to its first tokens, padding rows left out."""
    rows = {name: take(case.args[name], range(tokens)) for name in BATCHING[case.op].rows if _is_tensor(case, name)}
    bounds = torch.tensor([0, tokens], dtype=case.args["cu_seqlens"].dtype)
    return case.with_args(f"tokens{tokens}", cu_seqlens=bounds, **rows)


def _is_tensor(case: Case, name: str) -> bool:
    return isinstance(case.args[name], Tensor)
