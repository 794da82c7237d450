"""Routing on CPU by our own kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu.native.library import FLOAT, INT, LONG, POINTER, dense_rows, function, supported, threads
from k3hal.dispatch import provides


@lru_cache(maxsize=1)
def _kernel() -> Any:
    return function("route", "k3hal_route", POINTER, LONG, POINTER, LONG, LONG, LONG, INT, FLOAT, POINTER, POINTER, INT)


@provides("moe_route", name="native", priority=60, supports=supported)
def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See the operator."""
    logits, bias = dense_rows(logits), bias.contiguous()
    tokens, experts = logits.shape
    weights, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int32)
    _kernel()(
        logits.data_ptr(), logits.stride(0), bias.data_ptr(), tokens, experts, top_k, renormalize, scale,
        weights.data_ptr(), ids.data_ptr(), threads(),
    )  # fmt: skip
    return weights, ids
