"""The gated delta rule over packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import (
    PREFILL_BENCH,
    PREFILL_CASES,
    KdaCase,
    cache_inputs,
    delta_step,
    kda_samples,
    recurrence_inputs,
    sequence_inputs,
)


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
) -> Tensor:
    """Decay, correct and read the state, token by token (k3_architecture §2.4).

    q, k, v [T, H, K] in the activation dtype, rows may be strided; q and k raw (the L2 norm with 1e-6 on the sum and
    q's scale K^-0.5 are inside). g fp32 [T, H, K] log decay, <= 0 and of any size; beta fp32 [T, H]. state fp32
    [S, H, V, K], K contiguous, slot stride arbitrary (mutated); slots int32 [N], distinct but for 0; cu_seqlens int32
    [N + 1] from 0; has_state bool [N].
    A sequence starts from its slot where has_state, else from zeros, and then the slot is never read; its final state
    is written back. A sequence with slot 0 gives zero rows and touches nothing; an empty one leaves its slot as it
    was; rows from cu_seqlens[-1] on are padding: never read, zero in the result. fp32 inside, one cast. Returns a new
    tensor [T, H, V] in v's dtype.
    """
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    starts = cu_seqlens.tolist()
    for n, (slot, known) in enumerate(zip(slots.tolist(), has_state.tolist(), strict=True)):
        if slot == 0 or starts[n] == starts[n + 1]:
            continue
        current = state[slot] if known else torch.zeros_like(state[slot])
        for t in range(starts[n], starts[n + 1]):
            current, _, out_t = delta_step(current, q[t], k[t], v[t], g[t], beta[t])
            out[t] = out_t.to(out.dtype)
        state[slot] = current
    return out


def _cost(q: Tensor, g: Tensor, state: Tensor, slots: Tensor, **_: Any) -> Cost:
    tokens, heads, dim = q.shape
    moved = 4 * q.nbytes + g.nbytes + 4 * tokens * heads + 2 * slots.numel() * state[0].numel() * 4
    return Cost(flops=7.0 * tokens * heads * dim * dim, bytes=float(moved))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    caches = cache_inputs(gen, case, dtype)
    return {
        **recurrence_inputs(gen, case, dtype),
        "state": caches["state"],
        "slots": caches["slots"],
        **sequence_inputs(case),
    }


def _samples() -> Iterator[Sample]:
    return kda_samples(PREFILL_CASES + PREFILL_BENCH, _make, "prefill")


OPERATOR = Operator(
    reference=kda_chunk,
    family="kda",
    outputs={"out": "matmul", "state": "kda_state"},
    samples=_samples,
    cost=_cost,
    mutates=("state",),
    invariants=("split", "batch", "pad", "restore", "far"),
)
