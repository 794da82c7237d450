"""KDA on CPU by our own kernel, in one call, each state read and written once a token or less.

Prefill goes token by token too: eight tokens pass over a few rows of the state at a time, from the cache, which beats
products of chunks in library calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu.native.library import FLOAT, INT, LONG, POINTER, function, supported, threads
from k3hal.dispatch import provides
from k3hal.dispatch.call import Answer, Call, No

LANES, MAX_HEAD_DIM = 16, 1024


@lru_cache(maxsize=1)
def _kernel() -> Any:
    inputs, small, caches = (POINTER, LONG) * 4, (POINTER,) * 4, (POINTER, LONG) * 2
    sequences, sizes, gate = (POINTER,) * 3, (LONG,) * 5, (INT, FLOAT, FLOAT)
    return function("kda", "k3hal_kda", *inputs, *small, *caches, *sequences, POINTER, *sizes, *gate, INT, INT)


def _supports(call: Call) -> Answer:
    dim = call.dims.get("head_dim", LANES)
    if not isinstance(dim, int) or dim % LANES or dim > MAX_HEAD_DIM:
        return No(f"needs head_dim to be a multiple of {LANES} up to {MAX_HEAD_DIM}, this is {dim}")
    return supported(call)


def _laid_out(conv_weight: Tensor, A_log: Tensor, **others: Tensor) -> Mapping[str, Any]:
    """Taps as [W, C] and the gate's rate `exp(A_log)`; compiles the kernel, so that no request waits for it."""
    _kernel()
    return {"conv_weight": conv_weight.t().contiguous(), "A_log": A_log.exp(), **others}


@provides("kda_decode", name="native", priority=60, supports=_supports, prepare=_laid_out)
def kda_decode(
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
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """See the operator. `conv_weight` comes prepared as [W, C], `A_log` as its exponential."""
    return _run(
        qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
        conv_state, state, slots, None, None, lower_bound, eps,
    )  # fmt: skip


@provides("kda_prefill", name="native", priority=60, supports=_supports, prepare=_laid_out)
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
    """See the operator. Prepared as for `kda_decode`."""
    return _run(
        qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
        conv_state, state, slots, cu_seqlens.data_ptr(), has_state.data_ptr(), lower_bound, eps,
    )  # fmt: skip


def _run(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    taps: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    starts: int | None,
    known: int | None,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """`starts` and `known` are addresses; without them each row is a sequence with a state."""
    rows, heads, dim = raw_gate.shape
    out = qkv.new_empty(rows, heads * dim)
    _kernel()(
        qkv.data_ptr(), qkv.stride(0), raw_gate.data_ptr(), raw_gate.stride(0),
        beta_logits.data_ptr(), beta_logits.stride(0), out_gate.data_ptr(), out_gate.stride(0),
        taps.data_ptr(), rate.data_ptr(), dt_bias.data_ptr(), norm_weight.data_ptr(),
        conv_state.data_ptr(), conv_state.stride(0), state.data_ptr(), state.stride(0),
        slots.data_ptr(), starts, known, out.data_ptr(), slots.shape[0], rows, heads, dim, taps.shape[0],
        lower_bound is not None, lower_bound or 0.0, eps, qkv.dtype == torch.float32, threads(),
    )  # fmt: skip
    return out
