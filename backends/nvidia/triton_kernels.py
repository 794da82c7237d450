"""Routed MXFP4 experts by triton_kernels, the library of ragged products that grows beside Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded, usable
from k3hal.dispatch.ops._experts import gated
from k3hal.dispatch.transforms.experts import Grouped

# On the package index another project has the name, with releases below 1.
NEEDS = Needs(packages={"triton-kernels": ">=1.0", "triton": ">=3.5"}, dtypes=("bfloat16",), min_arch=90)
PRODUCT = recorded(
    __name__, "triton-kernels", "triton_kernels.matmul:matmul",
    ("a", "b", "bias", "a_ragged_metadata", "gather_indx", "precision_config"),
)  # fmt: skip
PRECISION = recorded(
    __name__, "triton-kernels", "triton_kernels.matmul:PrecisionConfig",
    ("b_mx_scale", "out_dtype"),
)  # fmt: skip
RAGGED = recorded(
    __name__, "triton-kernels", "triton_kernels.tensor:make_ragged_tensor_metadata",
    ("slice_sizes", "n_total_rows"),
)  # fmt: skip


def _supports(call: Call) -> Answer:
    return usable(call, (PRODUCT, PRECISION, RAGGED))


def _product(rows: Tensor, weight: Tensor, scale: Tensor, ragged: object, gather: Tensor | None) -> Tensor:
    """Rows [M, K] times each expert's codes [E, N, K / 2] transposed, fp32 [M, N]. The library wants the axis that
    scales run along to be the inner one in memory, and last but one in shape: as stored, seen transposed."""
    config = PRECISION(b_mx_scale=scale.transpose(1, 2), out_dtype=torch.float32)
    return PRODUCT(
        a=rows, b=weight.transpose(1, 2), bias=None, a_ragged_metadata=ragged, gather_indx=gather,
        precision_config=config,
    )  # fmt: skip


# Which kernel runs is decided on the host, from shapes alone; that it may be captured was not seen.
@provides("moe_experts_mxfp4", name="triton_kernels", needs=NEEDS, supports=_supports, priority=PRIORITY, mxfp4="w4a16")
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator. Choices of no expert come after all others, in rows that the products leave unwritten."""
    if x.shape[0] == 0:
        return torch.zeros_like(x)
    grouped = Grouped.of(ids, w13.shape[0])
    ragged = RAGGED(slice_sizes=grouped.counts, n_total_rows=ids.numel())
    tokens = (grouped.order // ids.shape[1]).int()
    hidden = _product(x, w13, w13_scale, ragged, tokens)
    acted = gated(hidden, activation, beta, linear_beta).to(x.dtype)
    return grouped.combined(_product(acted, w2, w2_scale, ragged, None), ids, weights, x.dtype)
