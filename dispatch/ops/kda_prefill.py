"""The inside of a KDA layer over packed sequences: convolution, gates, recurrence, output norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._conv_ties import off_ties
from k3hal.dispatch.ops._kda import (
    PREFILL_BENCH,
    PREFILL_CASES,
    KdaCase,
    cache_inputs,
    in_fp32,
    kda_samples,
    live_rows,
    projection_inputs,
    sequence_inputs,
    split_qkv,
    weight_inputs,
)
from k3hal.dispatch.ops.causal_conv1d import causal_conv1d
from k3hal.dispatch.ops.gated_rms_norm import gated_rms_norm
from k3hal.dispatch.ops.kda_chunk import kda_chunk
from k3hal.dispatch.ops.kda_gate import kda_gate


def kda_prefill(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """Everything between a KDA layer's projections and its output projection (k3_architecture §2.2 to §2.5).

    qkv [T, C = 3 H K] rows q | k | v, each head-major; raw_gate [T, H, K]; beta_logits [T, H]; out_gate [T, H, V = K]:
    the activation dtype, rows may be strided (views of one fused projection). conv_weight fp32 [C, W], A_log fp32 [H],
    dt_bias fp32 [H, K], norm_weight fp32 [V]. conv_state [S, W - 1, C] in the activation dtype and state fp32
    [S, H, V, K], K contiguous, slot strides arbitrary (both mutated). slots int32 [N], distinct but for 0; cu_seqlens
    int32 [N + 1] from 0; has_state bool [N].
    causal_conv1d, kda_gate, kda_chunk and gated_rms_norm in that order, by their contracts; the convolution's result
    is rounded to the activation dtype, what lies between the later steps may stay in fp32.
    Without has_state a sequence starts from zeros and its slot is never read. Rows of slot 0 and padding rows (from
    cu_seqlens[-1] on) are zero in the result, whatever they hold; slot 0 and the slots of empty sequences stay as they
    were. Returns a new tensor [T, H V] in the activation dtype.
    """
    return _compose(causal_conv1d, kda_gate, in_fp32(kda_chunk), gated_rms_norm)(
        qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
        conv_state, state, slots, cu_seqlens, has_state, lower_bound, eps,
    )  # fmt: skip


def _lower(parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Tensor]:
    return _compose(*(parts[name] for name in OPERATOR.lowers_to))


def _compose(
    conv: Callable[..., Tensor],
    gate: Callable[..., tuple[Tensor, Tensor]],
    chunk: Callable[..., Tensor],
    norm: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    def composed(
        qkv: Tensor,
        raw_gate: Tensor,
        beta_logits: Tensor,
        out_gate: Tensor,
        conv_weight: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        has_state: Tensor,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        mixed = conv(qkv, conv_weight, conv_state, slots, cu_seqlens, has_state)
        q, k, v = split_qkv(mixed, A_log.shape[0])
        g, beta = gate(raw_gate, beta_logits, A_log, dt_bias, lower_bound)
        out = (
            norm(chunk(q, k, v, g, beta, state, slots, cu_seqlens, has_state), out_gate, norm_weight, eps)
            .flatten(1)
            .to(qkv.dtype)
        )
        live = live_rows(cu_seqlens, slots, out.shape[0]).unsqueeze(-1)
        return torch.where(live, out, torch.zeros_like(out))

    return composed


def _cost(qkv: Tensor, raw_gate: Tensor, state: Tensor, conv_state: Tensor, slots: Tensor, **_: Any) -> Cost:
    tokens, heads, dim = raw_gate.shape
    caches = 2 * slots.numel() * (state[0].numel() * 4 + conv_state[0].numel() * conv_state.element_size())
    flops = tokens * heads * dim * (7.0 * dim + 50)
    return Cost(flops=flops, bytes=float(qkv.nbytes + 3 * raw_gate.nbytes + caches))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    args = {
        **projection_inputs(gen, case, dtype),
        **weight_inputs(gen, case),
        **cache_inputs(gen, case, dtype),
        **sequence_inputs(case),
    }
    if dtype == "bfloat16":
        off_ties(**{name: args[name] for name in signature(off_ties).parameters})
    return {**args, "lower_bound": case.lower_bound, "eps": case.eps}


def _samples() -> Iterator[Sample]:
    return kda_samples(PREFILL_CASES + PREFILL_BENCH, _make, "prefill")


OPERATOR = Operator(
    reference=kda_prefill,
    family="kda",
    outputs={"out": "matmul", "conv_state": "exact", "state": "kda_layer_state"},
    heads={"out": "norm_weight"},
    samples=_samples,
    cost=_cost,
    mutates=("conv_state", "state"),
    weights=("conv_weight", "A_log", "dt_bias", "norm_weight"),
    invariants=("split", "batch", "pad", "restore", "far"),
    lowers_to=("causal_conv1d", "kda_gate", "kda_chunk", "gated_rms_norm"),
    lowering=_lower,
    wide_parts=("kda_chunk", "gated_rms_norm"),
)
