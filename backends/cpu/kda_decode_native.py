"""KDA decode on CPU by our own kernel: the whole step in one call, each state read and written once."""

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
    sizes, gate = (LONG,) * 4, (INT, FLOAT, FLOAT)
    return function("kda", "k3hal_kda_decode", *inputs, *small, *caches, POINTER, POINTER, *sizes, *gate, INT, INT)


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
    rows, heads, dim = raw_gate.shape
    out = torch.empty(rows, heads * dim, dtype=qkv.dtype)
    _kernel()(
        qkv.data_ptr(), qkv.stride(0), raw_gate.data_ptr(), raw_gate.stride(0),
        beta_logits.data_ptr(), beta_logits.stride(0), out_gate.data_ptr(), out_gate.stride(0),
        conv_weight.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(), norm_weight.data_ptr(),
        conv_state.data_ptr(), conv_state.stride(0), state.data_ptr(), state.stride(0), slots.data_ptr(),
        out.data_ptr(), rows, heads, dim, conv_weight.shape[0],
        lower_bound is not None, lower_bound or 0.0, eps, qkv.dtype == torch.float32, threads(),
    )  # fmt: skip
    return out
