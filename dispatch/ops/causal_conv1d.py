"""Depthwise causal convolution with SiLU over packed sequences, with its history in slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import silu

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import (
    PREFILL_CASES,
    KdaCase,
    cache_inputs,
    kda_samples,
    projection_inputs,
    sequence_inputs,
    weight_inputs,
)


def causal_conv1d(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """y_t = SiLU(sum_j weight[:, j] x_{t - W + 1 + j}) for each sequence, per channel (k3_architecture §2.2).

    x [T, C] in the activation dtype, rows may be strided; weight fp32 [C, W], W >= 2, the last tap on the current
    token; conv_state [S, W - 1, C] in x's dtype, the last raw inputs, oldest first, slot stride arbitrary (mutated);
    slots int32 [N], distinct but for 0; cu_seqlens int32 [N + 1] from 0; has_state bool [N].
    History before the sequence is its slot where has_state, else zeros, and then the slot is never read. Afterwards
    the slot holds the last W - 1 raw inputs, old history included where the sequence is shorter. A sequence with slot
    0 gives zero rows and touches nothing; an empty one leaves its slot as it was; rows from cu_seqlens[-1] on are
    padding: never read, zero in the result. fp32 inside, one cast. Returns a new tensor [T, C] in x's dtype.
    """
    width = weight.shape[1]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    starts = cu_seqlens.tolist()
    for n, (slot, known) in enumerate(zip(slots.tolist(), has_state.tolist(), strict=True)):
        rows = x[starts[n] : starts[n + 1]]
        if slot == 0 or rows.shape[0] == 0:
            continue
        history = conv_state[slot] if known else torch.zeros_like(conv_state[slot])
        window = torch.cat((history, rows))
        taps = [weight[:, j] * window[j : j + rows.shape[0]].float() for j in range(width)]
        out[starts[n] : starts[n + 1]] = silu(torch.stack(taps).sum(0)).to(x.dtype)
        conv_state[slot] = window[-(width - 1) :]
    return out


def _cost(x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, **_: Any) -> Cost:
    history = 2 * slots.numel() * conv_state[0].numel() * conv_state.element_size()
    return Cost(flops=x.numel() * (2.0 * weight.shape[1] + 4), bytes=float(2 * x.nbytes + weight.nbytes + history))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    caches = cache_inputs(gen, case, dtype)
    return {
        "x": projection_inputs(gen, case, dtype)["qkv"],
        "weight": weight_inputs(gen, case)["conv_weight"],
        "conv_state": caches["conv_state"],
        "slots": caches["slots"],
        **sequence_inputs(case),
    }


def _samples() -> Iterator[Sample]:
    return kda_samples(PREFILL_CASES, _make, "any")


OPERATOR = Operator(
    reference=causal_conv1d,
    family="kda",
    outputs={"out": "norm", "conv_state": "exact"},
    samples=_samples,
    cost=_cost,
    mutates=("conv_state",),
    weights=("weight",),
    invariants=("split", "batch", "pad", "restore", "far"),
)
