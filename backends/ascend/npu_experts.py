"""Routed experts by torch_npu's grouped product: plain weights, and codes that it decodes itself.

On the A2 and A3 it knows integer codes of four bits, not those of MXFP4: each MXFP4 weight is the sum of two that it
knows, under one scale, and the products of both run as one of twice the length. It is exact, and takes twice the
memory. The A5 knows MXFP4, in the order in which its matrix unit reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from k3hal.backends.ascend._npu import A2, A3, A5, FUSED, torch_npu
from k3hal.dispatch import Answer, Call, provides
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.ops._experts import gated
from k3hal.dispatch.ops.mx_dequantize import GROUP, VALUES
from k3hal.dispatch.transforms.experts import Grouped

PRODUCT = recorded(
    __name__, "torch-npu", "torch.ops.npu:npu_grouped_matmul",
    (
        "x", "weight", "antiquant_scale", "antiquant_offset", "group_list", "split_item", "group_type",
        "group_list_type",
    ),
)  # fmt: skip
REORDERED = recorded(__name__, "torch-npu", "torch.ops.npu:npu_format_cast", ("input", "acl_format", "customize_dtype"))
PACKED = recorded(__name__, "torch-npu", "torch.ops.npu:npu_convert_weight_to_int4pack", ("weight",))
FRACTAL_NZ, ALIGNED = 29, 64
ONE = 127
"""Of E8M0."""
ONE_RESULT, BY_ROWS, COUNTS = 2, 0, 1
MOST_EXPERTS = 1024
Weights = tuple[Tensor, Tensor | None]
"""[E, K, N], or codes [E, K, N / 8] with scales [E, K / 32, N]: int32 and bf16, or float32 and u8 for MXFP4."""


def _supports(call: Call) -> Answer:
    experts = int(call.dims.get("experts") or 1)
    activation = call.dims.get("activation", "situ")
    return usable(
        call,
        (PRODUCT,),
        unless(experts <= MOST_EXPERTS, f"needs experts up to {MOST_EXPERTS}, these are {experts}"),
        unless(activation in ("situ", "silu"), f"needs activation silu or situ, this is {activation}"),
    )


def _supports_codes(call: Call) -> Answer:
    said = _supports(call)
    if not said:
        return said
    sizes = {name: int(call.dims.get(name) or 8) for name in ("hidden", "intermediate")}
    odd = [f"needs {name} a multiple of 8, this is {n}" for name, n in sizes.items() if n % 8]
    return usable(call, (PRODUCT,), *odd)


@cache
def _zeros(shape: torch.Size, device: torch.device) -> Tensor:
    """Offsets, which the library wants beside scales: one tensor for all layers."""
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def _product(rows: Tensor, weights: Weights, counts: Tensor) -> Tensor:
    """Rows [M, K], sorted by expert, times each one's weights; rows of no expert, which come last, are unwritten."""
    weight, scale = weights
    scales = None if scale is None else [scale]
    offsets = None if scale is None or scale.dtype is torch.uint8 else [_zeros(scale.shape, scale.device)]
    return PRODUCT(
        x=[rows], weight=[weight], antiquant_scale=scales, antiquant_offset=offsets, group_list=counts,
        split_item=ONE_RESULT, group_type=BY_ROWS, group_list_type=COUNTS,
    )[0]  # fmt: skip


def _summed(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Weights, w2: Weights, act: tuple[str, float, float], times: int = 1
) -> Tensor:
    """`moe_experts`; rows are repeated `times` along their length, for weights that are sums."""
    if not x.shape[0]:
        return torch.zeros_like(x)
    grouped = Grouped.of(ids, w13[0].shape[0])
    counts = grouped.counts.long()
    rows = x.index_select(0, grouped.order // ids.shape[1]).repeat(1, times)
    acted = gated(_product(rows, w13, counts).float(), *act).to(x.dtype)
    return grouped.combined(_product(acted.repeat(1, times), w2, counts), ids, weights, x.dtype)


def _turned(w13: Tensor, w2: Tensor) -> Mapping[str, Tensor]:
    return {"w13": w13.mT.contiguous(), "w2": w2.mT.contiguous()}


@provides(
    "moe_experts", name="torch_npu", needs=torch_npu(A2, A3, A5), supports=_supports, prepare=_turned, priority=FUSED,
    graph_safe=True,
)  # fmt: skip
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator. Weights come prepared with their inputs first."""
    return _summed(x, ids, weights, (w13, None), (w2, None), (activation, beta, linear_beta))


def nibbles(packed: Tensor) -> Tensor:
    """Codes u8 [.., D / 2], the low nibble first, as int8 [.., D] of 0 to 15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8)


def packed_columns(values: Tensor) -> Tensor:
    """Values int8 [E, K, N] from -8 to 7 as int32 [E, K, N / 8], the lowest four bits the first."""
    pairs = (values[..., ::2] & 15) | (values[..., 1::2] << 4)
    return pairs.contiguous().view(torch.int32)


def _int4(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Tensor]:
    given = {"w13": (w13, w13_scale), "w2": (w2, w2_scale)}
    out = {}
    for name, (codes, scale) in given.items():
        out[name] = torch.stack([packed_columns((nibbles(one) - 8).mT) for one in codes])
        out[f"{name}_scale"] = scale.mT.contiguous()
    return out


@provides(
    "moe_experts_int4", name="torch_npu", needs=torch_npu(A2, A3), supports=_supports_codes, prepare=_int4,
    priority=FUSED, graph_safe=True,
)  # fmt: skip
def moe_experts_int4(
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
    """See the operator. Codes come prepared as columns of signed numbers, scales with their groups first."""
    return _summed(x, ids, weights, (w13, w13_scale), (w2, w2_scale), (activation, beta, linear_beta))


def split_codes(packed: Tensor) -> Tensor:
    """MXFP4 codes u8 [N, K / 2] as int8 [2 K, N]: twice the weights are the sums of the first K rows and the others,
    all of -8 to 7."""
    twice = torch.tensor([*(2 * v for v in VALUES), *(-2 * v for v in VALUES)], dtype=torch.int8, device=packed.device)
    doubled = twice[nibbles(packed).long()].mT
    most = doubled.clamp(-7, 7)
    return torch.cat((most, doubled - most))


def _mxfp4(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Tensor]:
    given = {"w13": (w13, w13_scale), "w2": (w2, w2_scale)}
    out = {}
    for name, (codes, scale) in given.items():
        out[name] = torch.stack([packed_columns(split_codes(one)) for one in codes])
        out[f"{name}_scale"] = halved_scales(scale).mT.repeat(1, 2, 1).contiguous()
    return out


def halved_scales(scales: Tensor) -> Tensor:
    """2^(scale - 128) as bf16, from where its exponent stands; 255 is NaN."""
    bits = torch.where(scales > 1, (scales.int() - 1) << 23, 1 << (21 + scales.int().clamp_max(1)))
    return torch.where(scales == 255, torch.nan, bits.view(torch.float32)).to(torch.bfloat16)


@provides(
    "moe_experts_mxfp4", name="torch_npu_sums", needs=torch_npu(A2, A3), supports=_supports_codes, prepare=_mxfp4,
    priority=FUSED, graph_safe=True, mxfp4="w4a16",
)  # fmt: skip
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
    """See the operator. Codes come prepared by `split_codes`, scales halved and twice over."""
    return _summed(x, ids, weights, (w13, w13_scale), (w2, w2_scale), (activation, beta, linear_beta), 2)


def _supports_mxfp4(call: Call) -> Answer:
    said = _supports(call)
    return usable(call, (REORDERED, PACKED)) if said else said


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _wide(codes: Tensor, parts: int) -> Tensor:
    """Numbers fp32 [E, K, N] of MXFP4 codes u8 [E, N, K / 2], zero up to whole units of K and of each part of N."""
    numbers = torch.tensor([*VALUES, *(-v for v in VALUES)], device=codes.device)
    count, columns = codes.shape[0], codes.shape[1] // parts
    wide = numbers.new_zeros(count, _aligned(2 * codes.shape[2]), parts, _aligned(columns))
    for into, expert in zip(wide, codes, strict=True):
        into[: 2 * codes.shape[2], :, :columns] = numbers[nibbles(expert).long()].mT.unflatten(1, (parts, columns))
    return wide.flatten(2)


def _wide_scales(scale: Tensor, parts: int) -> Tensor:
    """[E, N, K / 32] as [E, K / 32, N] of the sizes of `_wide`: one where it added zeros."""
    each = scale.mT.unflatten(2, (parts, scale.shape[1] // parts))
    more = (0, _aligned(each.shape[3]) - each.shape[3], 0, 0, 0, each.shape[1] % (ALIGNED // GROUP))
    return functional.pad(each, more, value=ONE).flatten(2).contiguous()


def _reordered(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Tensor]:
    given = {"w13": (w13, w13_scale, 2), "w2": (w2, w2_scale, 1)}
    out = {}
    for name, (codes, scale, parts) in given.items():
        ordered = REORDERED(input=_wide(codes, parts), acl_format=FRACTAL_NZ, customize_dtype=torch.bfloat16)
        out[name] = PACKED(weight=ordered).contiguous()
        out[f"{name}_scale"] = _wide_scales(scale, parts)
    return out


@provides(
    "moe_experts_mxfp4", name="torch_npu", needs=torch_npu(A5), supports=_supports_mxfp4, prepare=_reordered,
    priority=FUSED, graph_safe=True, mxfp4="w4a16",
)  # fmt: skip
def moe_experts_mxfp4_own(
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
    """See the operator. Codes come prepared in the library's order, scales with their groups first, both with zeros up
    to what the library wants."""
    hidden, more = x.shape[1], w13.shape[1] - x.shape[1]
    rows = functional.pad(x, (0, more)) if more else x
    out = _summed(rows, ids, weights, (w13, w13_scale), (w2, w2_scale), (activation, beta, linear_beta))
    return out[:, :hidden].contiguous()
