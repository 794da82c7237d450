"""Projections by torch, which calls cuBLAS: sums in fp32 and rounded once, as the operators say."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear as library

from k3hal.dispatch import Needs, provides

# From 2.8 on `mm` takes bf16 factors to an fp32 product.
NEEDS = Needs(packages={"torch": ">=2.8"})


@cache
def _exact_sums() -> None:
    """By default torch lets cuBLAS add parts of a long sum in bf16; TF32 would round the factors of fp32 products."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


@provides("linear", name="torch", needs=NEEDS, graph_safe=True)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    _exact_sums()
    return library(x, weight)


@provides("linear_fp32", name="torch", needs=NEEDS, graph_safe=True)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    _exact_sums()
    return library(x, weight) if x.dtype == torch.float32 else torch.mm(x, weight.t(), out_dtype=torch.float32)
