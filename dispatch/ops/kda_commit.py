"""Advances KDA states over the accepted prefix of verified tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import VERIFY_CASES, KdaCase, cache_inputs, kda_samples, l2_normalise, weight_inputs
from k3hal.dispatch.ops.kda_gate import kda_gate
from k3hal.dispatch.sampling_inputs import int32, randn


def kda_commit(
    u: Tensor,
    k: Tensor,
    raw_gate: Tensor,
    conv_in: Tensor,
    accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: float | None,
) -> None:
    """Leave each slot as if the first `accepted` tokens of kda_verify had been decoded (k3_architecture §10.1).

    u fp32 [N, Q, H, V], k and raw_gate [N, Q, H, K], conv_in [N, Q, C]: kda_verify's records, k before its L2 norm.
    accepted int32 [N] in 0..Q; A_log fp32 [H], dt_bias fp32 [H, K]; conv_state [S, W - 1, C] in the activation dtype
    and state fp32 [S, H, V, K], K contiguous, slot strides arbitrary (both mutated); slots int32 [N], distinct but
    for 0. S_n = diag(exp g_n) S_{n-1} + k_n u_n^T for each accepted token, the correction being in u already. A row
    with accepted 0 or slot 0 touches nothing; records past `accepted` are never read. fp32 inside.
    """
    history = conv_state.shape[1]
    for n, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        if slot == 0 or count == 0:
            continue
        no_logits = raw_gate[n, :count, :, 0]
        g, _ = kda_gate(raw_gate[n, :count], no_logits, A_log, dt_bias, lower_bound)
        keys, current = l2_normalise(k[n, :count]), state[slot]
        for t in range(count):
            current = current * g[t].exp().unsqueeze(-2) + u[n, t].unsqueeze(-1) * keys[t].unsqueeze(-2)
        state[slot] = current
        conv_state[slot] = torch.cat((conv_state[slot], conv_in[n, :count]))[-history:]


def _cost(u: Tensor, k: Tensor, conv_in: Tensor, conv_state: Tensor, state: Tensor, **_: Any) -> Cost:
    count, width, heads, dim = k.shape
    caches = 2 * count * (state[0].numel() * 4 + conv_state[0].numel() * conv_state.element_size())
    moved = u.nbytes + 2 * k.nbytes + conv_in.nbytes + caches
    return Cost(flops=3.0 * count * width * heads * dim * dim, bytes=float(moved))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    count, width, heads, dim = len(case.lengths), case.lengths[0], case.heads, case.head_dim
    weights = weight_inputs(gen, case)
    return {
        "u": randn(gen, count, width, heads, dim),
        "k": randn(gen, count, width, heads, dim, dtype=dtype, scale=case.scale),
        "raw_gate": randn(gen, count, width, heads, dim, dtype=dtype),
        "conv_in": randn(gen, count, width, 3 * heads * dim, dtype=dtype),
        "accepted": int32((width - n) % (width + 1) for n in range(count)),
        "A_log": weights["A_log"],
        "dt_bias": weights["dt_bias"],
        **cache_inputs(gen, case, dtype),
        "lower_bound": case.lower_bound,
    }


def _samples() -> Iterator[Sample]:
    return kda_samples(VERIFY_CASES, _make, "verify")


OPERATOR = Operator(
    reference=kda_commit,
    family="kda",
    outputs={"conv_state": "exact", "state": "kda_state"},
    samples=_samples,
    cost=_cost,
    mutates=("conv_state", "state"),
    weights=("A_log", "dt_bias"),
    invariants=("batch", "pad", "far"),
)
