"""The sum over chosen experts, fast, for any weight format that can hand out fp32 matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from k3hal.backends.cpu._linear import linear, rows_times_stack
from k3hal.dispatch.ops._experts import as_it_is, gated

# `load(experts)` yields the experts' fp32 matrices in order, in stacks [g, N, K] of one or more; a stack is valid until
# the next is asked for.
Load = Callable[[list[int]], Iterable[Tensor]]
Act = tuple[str, float, float]
Rounding = Callable[[Tensor], Tensor]

MAX_ELEMENTS = 1 << 26


def sum_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, first: Load, second: Load, act: Act, rounded: Rounding = as_it_is
) -> Tensor:
    """`sum_j weights[t, j] second_e(act(first_e x_t))` [T, D] in x dtype; contract of `moe_experts`.

    `rounded` is what both products make of their rows in fp32.

    Everything is fp32 whatever x dtype is: converting a bf16 matrix costs less than the slower bf16 GEMMs of few rows,
    and a token's result then never depends on which tokens share its step beyond fp32 rounding.
    """
    if x.shape[0] == 1:
        return _one_token(x, ids, weights, first, second, act, rounded).to(x.dtype)
    step = max(1, MAX_ELEMENTS // (ids.shape[1] * 4 * x.shape[1]))
    if x.shape[0] <= step:
        return _many_tokens(x, ids, weights, first, second, act, rounded).to(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for a in range(0, x.shape[0], step):
        part = slice(a, a + step)
        out[part] = _many_tokens(x[part], ids[part], weights[part], first, second, act, rounded).to(x.dtype)
    return out


def _one_token(
    x: Tensor, ids: Tensor, weights: Tensor, first: Load, second: Load, act: Act, rounded: Rounding
) -> Tensor:
    """One row: each chosen matrix is streamed once, where it lies."""
    chosen = ids[0].tolist()
    kept = [j for j, e in enumerate(chosen) if e >= 0]
    if not kept:
        return torch.zeros(x.shape, dtype=torch.float32)
    experts = [chosen[j] for j in kept]
    row = rounded(x.float())
    products = torch.cat([rows_times_stack(row.expand(len(stack), -1), stack) for stack in first(experts)])
    hidden = rounded(gated(products, *act))
    each, done = [], 0
    for stack in second(experts):
        each.append(rows_times_stack(hidden[done : done + len(stack)], stack))
        done += len(stack)
    return torch.mm(weights[:, kept] if len(kept) < len(chosen) else weights, torch.cat(each))


def _many_tokens(
    x: Tensor, ids: Tensor, weights: Tensor, first: Load, second: Load, act: Act, rounded: Rounding
) -> Tensor:
    """Rows sorted by expert, so that each matrix is read once and meets all of its rows together."""
    ordered, order = ids.flatten().sort(stable=True)
    found, found_counts = (t.tolist() for t in torch.unique_consecutive(ordered, return_counts=True))
    skipped = sum(n for e, n in zip(found, found_counts, strict=True) if e < 0)
    experts = [e for e in found if e >= 0]
    counts = found_counts[len(found) - len(experts) :]
    if not experts:
        return torch.zeros(x.shape, dtype=torch.float32)
    order = order[skipped:]
    rows = rounded(x.float()).index_select(0, order // ids.shape[1])
    hidden = rounded(gated(_products(rows, counts, first(experts)), *act))
    each = _products(hidden, counts, second(experts))
    if skipped:
        # Rows of unused choices must exist for the sum below, and garbage weights must not reach them.
        by_choice = torch.zeros(ids.numel(), each.shape[1])
        weights = weights.masked_fill(ids < 0, 0.0)
    else:
        by_choice = torch.empty_like(each)
    by_choice.index_copy_(0, order, each)
    return torch.bmm(weights[:, None], by_choice.view(*ids.shape, -1))[:, 0]


def _products(rows: Tensor, counts: list[int], stacks: Iterable[Tensor]) -> Tensor:
    """Each expert's rows times its matrix, [rows, N]."""
    out, parts = [], iter(rows.split(counts))
    for stack in stacks:
        out += [linear(part, matrix) for matrix, part in zip(stack.unbind(0), parts, strict=False)]
    return torch.cat(out)
