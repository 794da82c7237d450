"""Projections by torch, which calls hipBLASLt or rocBLAS: sums in fp32 and rounded once, as the operators say."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as library

from k3hal.dispatch import Answer, Call, Needs, No, Yes, provides

NEEDS = Needs(packages={"torch": ">=2.8", "rocm": ""})


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    """The product. Where the process allows TF32, ROCm may round the factors of fp32 products to it: not here."""
    matmul = torch.backends.cuda.matmul
    if x.dtype is not torch.float32 or not matmul.allow_tf32:
        return library(x, weight)
    matmul.allow_tf32 = False
    try:
        return library(x, weight)
    finally:
        matmul.allow_tf32 = True


@provides("linear", name="torch", needs=NEEDS, graph_safe=True)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return _exact(x, weight)


def _supports_fp32(call: Call) -> Answer:
    if call.dtype == "float32":
        return Yes()
    # Refused by torch itself, seen up to 2.9 on ROCm 7.0: "output type float is not supported for ROCm".
    return No(f"torch on ROCm has no product of {call.dtype} with an fp32 result")


@provides("linear_fp32", name="torch", needs=NEEDS, supports=_supports_fp32, graph_safe=True)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return _exact(x, weight)
