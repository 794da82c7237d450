"""The gated delta rule for one token a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import (
    DECODE_BENCH,
    DECODE_CASES,
    KdaCase,
    cache_inputs,
    delta_step,
    kda_samples,
    recurrence_inputs,
)


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """One step of the recurrence for each row (k3_architecture §2.4).

    q, k, v [N, H, K] in the activation dtype, rows may be strided; q and k raw (the L2 norm with 1e-6 on the sum and
    q's scale K^-0.5 are inside). g fp32 [N, H, K] log decay; beta fp32 [N, H]. state fp32 [S, H, V, K], K contiguous,
    slot stride arbitrary (mutated); slots int32 [N], distinct but for 0, each holding a valid state. A row with slot 0
    gives zeros and touches nothing. fp32 inside, one cast. Returns a new tensor [N, H, V] in v's dtype.
    """
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for n, slot in enumerate(slots.tolist()):
        if slot != 0:
            state[slot], _, row = delta_step(state[slot], q[n], k[n], v[n], g[n], beta[n])
            out[n] = row.to(out.dtype)
    return out


def _cost(q: Tensor, g: Tensor, state: Tensor, **_: Any) -> Cost:
    rows, heads, dim = q.shape
    moved = 4 * q.nbytes + g.nbytes + 4 * rows * heads + 2 * rows * state[0].numel() * 4
    return Cost(flops=7.0 * rows * heads * dim * dim, bytes=float(moved))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    caches = cache_inputs(gen, case, dtype)
    return {**recurrence_inputs(gen, case, dtype), "state": caches["state"], "slots": caches["slots"]}


def _samples() -> Iterator[Sample]:
    return kda_samples(DECODE_CASES + DECODE_BENCH, _make, "decode")


OPERATOR = Operator(
    reference=kda_recurrent,
    family="kda",
    outputs={"out": "matmul", "state": "kda_state"},
    samples=_samples,
    cost=_cost,
    mutates=("state",),
    invariants=("batch", "pad", "far"),
)
