"""Projections by torch, which calls cuBLAS: sums in fp32 and rounded once, as the operators say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import linear as library

from k3hal.dispatch import Needs, provides

# From 2.8 on `mm` takes bf16 factors to an fp32 product.
NEEDS = Needs(packages={"torch": ">=2.8"})


_FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_tf32")


@contextmanager
def _exact_sums() -> Iterator[None]:
    """By default torch lets cuBLAS add parts of a long sum in bf16; TF32 would round the factors of fp32 products.

    Both are off within, and as they were afterwards: they belong to the process, not to a provider.
    """
    matmul = torch.backends.cuda.matmul
    on = [name for name in _FLAGS if getattr(matmul, name)]
    try:
        for name in on:
            setattr(matmul, name, False)
        yield
    finally:
        for name in on:
            setattr(matmul, name, True)


@provides("linear", name="torch", needs=NEEDS, graph_safe=True)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    with _exact_sums():
        return library(x, weight)


@provides("linear_fp32", name="torch", needs=NEEDS, graph_safe=True)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    with _exact_sums():
        return library(x, weight) if x.dtype == torch.float32 else torch.mm(x, weight.t(), out_dtype=torch.float32)
