"""Python faces of `experts.cpp` and `gated.cpp`: routed experts and gated activations in fp32."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu._scratch import Scratch
from k3hal.backends.cpu.native.library import FLOAT, INT, LONG, POINTER, dense_rows, function, threads
from k3hal.backends.cpu.native.packing import LANES, Packed, pack, pack_mxfp4

# Floats of scratch a call may use; more tokens take several calls.
MAX_SCRATCH = 1 << 25
_scratch = Scratch()


@lru_cache(maxsize=1)
def _experts() -> Any:
    weights = (POINTER, POINTER, INT)
    sizes = (LONG, LONG, LONG)
    return function(
        "experts", "k3hal_experts", POINTER, LONG, POINTER, POINTER, *sizes, *weights, *weights, LONG, LONG,
        INT, FLOAT, FLOAT, POINTER, POINTER, INT,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _gated() -> Any:
    return function("gated", "k3hal_gated", POINTER, LONG, POINTER, LONG, LONG, INT, FLOAT, FLOAT, INT)


def compile_kernels() -> None:
    """Compile or load now, so that no request waits for it."""
    _experts()
    _gated()


def pack_experts(weight: Tensor, scale: Tensor | None) -> Packed:
    """A stack of experts [E, R, D]: plain, or MXFP4 codes with their scales."""
    return pack(weight) if scale is None else pack_mxfp4(weight, scale)


def sum_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Packed, w2: Packed, activation: str, beta: float, linear_beta: float
) -> Tensor:
    """The contract of `moe_experts` before its cast: fp32 [T, D]."""
    tokens, top_k = ids.shape
    x, ids, weights = dense_rows(x), ids.contiguous(), weights.contiguous()
    out = torch.empty(tokens, w2.rows)
    per_token = top_k * (_padded(w13.rows) + _padded(w2.rows))
    step = max(1, min(tokens, MAX_SCRATCH // per_token))
    scratch = _scratch.take("experts", step * per_token, torch.float32)
    for a in range(0, tokens, step):
        _experts()(
            x[a:].data_ptr(), x.stride(0), ids[a:].data_ptr(), weights[a:].data_ptr(), min(step, tokens - a), top_k,
            w13.data.shape[0], *w13.pointers, w13.kind, *w2.pointers, w2.kind, w2.rows, w2.depth,
            activation == "situ", beta, linear_beta, scratch.data_ptr(), out[a:].data_ptr(), threads(),
        )  # fmt: skip
    return out


def _padded(rows: int) -> int:
    return -(-rows // LANES) * LANES


def gated(x: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """The gated activation of x [T, 2 I] = [gate | up] in fp32, [T, I]."""
    x = dense_rows(x)
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, inner)
    _gated()(x.data_ptr(), x.stride(0), out.data_ptr(), rows, inner, activation == "situ", beta, linear_beta, threads())
    return out
