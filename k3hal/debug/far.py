"""Offsets beyond 2^31: a call whose slots and pages lie far out in a huge cache, of which only they take memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.contain import contained
from k3hal.debug.execute import Calls
from k3hal.debug.golden import named_outputs
from k3hal.debug.memory import place

Pair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
WRAPS = (2**31, 2**32)
"""Where an offset in 32 bits ends, signed or not; in bytes or in elements."""
MOST_BYTES = 1 << 20
"""Of a case's arguments: what the largest samples say about values is said elsewhere."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's value, which this Python may not name: the machine need not have the memory that is not touched."""
_CACHES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("kda_prefill", "kda_decode", "kda_commit"), (("conv_state", "state"), ("slots",))),
    **dict.fromkeys(("kda_chunk", "kda_recurrent"), (("state",), ("slots",))),
    "causal_conv1d": (("conv_state",), ("slots",)),
    **dict.fromkeys(("mla_prefill", "mla_decode"), (("kv_cache",), ("page_table",))),
    "mla_cache_insert": (("kv_cache",), ("rows",)),
    "copy_pages": (("arena",), ("src", "dst")),
}
"""The caches of an operator and the arguments that point into them."""


def far_offsets(calls: Calls, case: Case) -> list[Pair]:
    """The case, and the same with its slots or pages beyond 2^31 and 2^32 bytes and 2^31 elements.

    Outputs are the same, what is written far out is what was written near by, and where a wrapped offset would point
    nothing was written. Nothing on a device, or for a case without slots, or too large a case.
    """
    operator, target = calls.operator, calls.target
    if case.op not in _CACHES or target.device != "cpu" or case.nbytes > MOST_BYTES:
        return []
    caches, indices = _CACHES[case.op]
    used = _used(case)
    if not used.numel():
        return []
    near = calls(case.args)
    rows = _places(used, [case.args[name] for name in caches])
    huge = {name: _spread_out(case.args[name], used, rows) for name in caches}
    args = {**case.args, **huge, **{name: _renumbered(case, name, used, rows) for name in indices}}
    with torch.inference_mode(), contained(torch.device(target.device)) as changes:
        call = dict(args)
        if target.prepare:
            call |= target.prepare(**{name: call[name] for name in operator.weights})
        far = named_outputs(operator, target.fn(**call), call)
    calls.note(changes)
    got, want = dict(far), dict(near)
    for name in set(caches) & set(operator.mutates):
        hit = _hit_by_wrapping(args[name], rows)
        got[name] = torch.cat((args[name][rows], args[name][hit])).clone()
        rest = torch.zeros(len(hit), *got[name].shape[1:], dtype=torch.uint8).to(got[name].dtype)
        want[name] = torch.cat((near[name][used], rest))
    return [({name: value for name, value in got.items() if name not in huge or name in operator.mutates}, want)]


def _used(case: Case) -> Tensor:
    """The rows of the caches that the case may use, 0 left out."""
    caches, indices = _CACHES[case.op]
    cache, found = case.args[caches[0]], []
    for name in indices:
        index = case.args[name].long().flatten()
        index = index[index >= 0] // (cache.shape[1] if name == "rows" else 1)
        found.append(index[(index > 0) & (index < cache.shape[0])])
    return torch.cat(found).unique()


def _places(used: Tensor, caches: list[Tensor]) -> Tensor:
    """A row far out for each of `used`: the farthest first, then where each other offset ends."""
    ends = {
        wrap * unit // (cache.stride(0) * cache.element_size())
        for cache in caches
        for wrap in WRAPS
        for unit in (1, cache.element_size())
    }
    starts = sorted(ends, reverse=True)
    taken: list[int] = []
    for n in range(len(used)):
        row = starts[n % len(starts)]
        while row in taken:
            row += 1
        taken.append(row)
    return torch.tensor(taken)


def _spread_out(cache: Tensor, used: Tensor, rows: Tensor) -> Tensor:
    """A cache of the same rows, apart as they were, in memory that is only there where it is written."""
    size, count = cache.element_size(), int(rows.max()) + 2
    length = count * cache.stride(0) * size
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    out = place(buffer, 0, cache.dtype, (count, *cache.shape[1:]), cache.stride())
    out[0] = cache[0]
    out[rows] = cache[used]
    return out


def _renumbered(case: Case, name: str, used: Tensor, rows: Tensor) -> Tensor:
    """An index argument with the new rows; what pointed nowhere still does."""
    index = case.args[name]
    page = case.args[_CACHES[case.op][0][0]].shape[1] if name == "rows" else 1
    row = index.long() // page
    at = torch.searchsorted(used, row).clamp_max(len(used) - 1)
    moved = torch.where(used[at] == row, rows[at], row)
    return (moved * page + index.long() % page).to(index.dtype)


def _hit_by_wrapping(cache: Tensor, rows: Tensor) -> Tensor:
    """The rows, themselves unused, at which an offset of one of `rows` points once it has wrapped."""
    stride, size = cache.stride(0), cache.element_size()
    hit = {
        int(row) - wrap * unit // (stride * size) - back
        for row in rows
        for wrap in WRAPS
        for unit in (1, size)
        for back in (0, 1)
    }
    return torch.tensor(sorted(row for row in hit if row > 0 and row not in set(rows.tolist())), dtype=torch.int64)
