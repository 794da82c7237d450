"""Gated activations on CPU by our own kernels: one pass, no temporaries."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu.native.library import FLOAT, INT, LONG, POINTER, function, supported, threads
from k3hal.dispatch import provides


@lru_cache(maxsize=1)
def _sigmoid_gate() -> Any:
    return function("activations", "k3hal_sigmoid_gate", *(POINTER, LONG) * 2, POINTER, LONG, LONG, INT, INT)


@lru_cache(maxsize=1)
def _silu_and_mul() -> Any:
    return function("activations", "k3hal_silu_and_mul", POINTER, LONG, POINTER, LONG, LONG, INT, INT)


@lru_cache(maxsize=1)
def _situ_and_mul() -> Any:
    return function("activations", "k3hal_situ_and_mul", POINTER, LONG, POINTER, LONG, LONG, FLOAT, FLOAT, INT, INT)


@provides("sigmoid_gate", name="native", priority=60, supports=supported)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See the operator."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype)
    _sigmoid_gate()(
        x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), out.data_ptr(), rows, dim,
        x.dtype == torch.float32, threads(),
    )  # fmt: skip
    return out


@provides("silu_and_mul", name="native", priority=60, supports=supported)
def silu_and_mul(x: Tensor) -> Tensor:
    """See the operator."""
    rows, dim = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, dim, dtype=x.dtype)
    _silu_and_mul()(x.data_ptr(), x.stride(0), out.data_ptr(), rows, dim, x.dtype == torch.float32, threads())
    return out


@provides("situ_and_mul", name="native", priority=60, supports=supported)
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See the operator."""
    rows, dim = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, dim, dtype=x.dtype)
    _situ_and_mul()(
        x.data_ptr(), x.stride(0), out.data_ptr(), rows, dim, beta, linear_beta, x.dtype == torch.float32, threads()
    )
    return out
