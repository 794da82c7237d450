"""Norms on CPU by our own kernels: a row is read once, in one call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu.native.library import FLOAT, INT, LONG, POINTER, function, supported, threads
from k3hal.dispatch import provides


@lru_cache(maxsize=1)
def _rms_norm() -> Any:
    rows, sizes = (POINTER, LONG) * 2, (LONG, LONG, FLOAT)
    return function("norms", "k3hal_rms_norm", *rows, POINTER, POINTER, *sizes, INT, INT, INT)


@lru_cache(maxsize=1)
def _attn_res_mix() -> Any:
    rows, blocks, weights = (POINTER, LONG) * 3, (LONG, LONG, INT, INT), (POINTER, POINTER, FLOAT, FLOAT)
    return function("norms", "k3hal_attn_res_mix", *rows, *blocks, *weights, POINTER, LONG, LONG, INT, INT)


@provides("rms_norm", name="native", priority=60, supports=supported)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator."""
    out = x.new_empty(x.shape)
    dim = x.shape[-1]
    if x.dim() != 2:
        x, residual = x.reshape(-1, dim), None if residual is None else residual.view(-1, dim)
    taken = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    _rms_norm()(
        x.data_ptr(), x.stride(0), *taken, weight.data_ptr(), out.data_ptr(), x.shape[0], dim, eps,
        x.dtype == torch.float32, weight.dtype == torch.float32, threads(),
    )  # fmt: skip
    return out


@provides("attn_res_mix", name="native", priority=60, supports=supported)
def attn_res_mix(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    num_blocks: int,
    reset: bool,
    store: bool,
    key_weight: Tensor,
    out_weight: Tensor | None,
    eps: float,
    out_eps: float,
) -> Tensor:
    """See the operator."""
    rows, dim = prefix.shape
    out = prefix.new_empty(rows, dim)
    added = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
    _attn_res_mix()(
        prefix.data_ptr(), prefix.stride(0), *added, blocks.data_ptr(), blocks.stride(1), blocks.stride(0),
        num_blocks, reset, store, key_weight.data_ptr(), None if out_weight is None else out_weight.data_ptr(),
        eps, out_eps, out.data_ptr(), rows, dim, prefix.dtype == torch.float32, threads(),
    )  # fmt: skip
    return out
