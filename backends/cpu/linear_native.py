"""Projections on CPU by our own kernel: weights packed once, streamed at memory speed for few rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu.native.library import INT, LONG, POINTER, dense_rows, function, supported, threads
from k3hal.backends.cpu.native.packing import Packed, pack
from k3hal.dispatch import provides


@lru_cache(maxsize=1)
def kernel() -> Any:
    return function(
        "linear", "k3hal_linear", POINTER, LONG, POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, LONG, INT, INT
    )


def product(x: Tensor, weight: Packed) -> Tensor:
    """`x weight^T` in fp32, [T, R]."""
    x = dense_rows(x)
    rows = x.shape[0]
    out = torch.empty(rows, weight.rows)
    data, scales = weight.pointers
    kernel()(
        x.data_ptr(), x.stride(0), data, scales, out.data_ptr(), weight.rows, rows, weight.depth, weight.rows, 1,
        weight.kind, threads(),
    )  # fmt: skip
    return out


def packed(weight: Tensor) -> Mapping[str, Any]:
    """The weight in the kernel's layout; compiles the kernel, so that no request waits for it."""
    kernel()
    return {"weight": pack(weight)}


@provides("linear", name="native", priority=60, supports=supported, prepare=packed)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator; `weight` is `Packed`."""
    assert isinstance(weight, Packed)
    out = product(x, weight)
    return out if x.dtype == torch.float32 else out.to(x.dtype)
