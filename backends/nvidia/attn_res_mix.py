"""Attention residuals on Hopper by our own kernels: a stream of rows, or for few rows a cluster of programs each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from k3hal.backends.nvidia.native.library import Kernel, kernel, supported
from k3hal.dispatch import Needs, provides
from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.errors import UnsupportedError

DIM, SPREAD, SLOTS, FEW_ROWS = 7168, 4, 15, 48
MOST_BLOCKS, WIDE_BLOCKS = 8, 15
"""Stored blocks that threads of two sizes can hold."""


ARGUMENTS = struct.Struct("@6Q4q6i2f")
"""`struct Arguments` of the kernel file: pointers, strides, numbers."""


def _supports(call: Call) -> Answer:
    dim, answer = call.dims.get("dim"), supported(call)
    reasons = answer.reasons if isinstance(answer, No) else ()
    if dim != DIM:
        reasons = (f"needs dim {DIM}, this is {dim}", *reasons)
    return No(*reasons) if reasons else Yes("compiled for Hopper on first use")


@cache
def _kernel(few: bool, wide: bool, index: int) -> tuple[Kernel, int, int]:
    """A kernel, its threads, and how many multiprocessors the device has."""
    workers = 896 if wide else 224
    macros = (f"DIM={DIM}", f"WORKERS={workers}", f"MOST={WIDE_BLOCKS if wide else MOST_BLOCKS}")
    processors = torch.cuda.get_device_properties(index).multi_processor_count
    if few:
        return kernel("attn_res_mix", "spread", macros, 0, index), DIM // 8 // SPREAD, processors
    return kernel("attn_res_mix", "mix", macros, SLOTS * DIM * 2, index), workers + 32, processors


def _aligned(x: Tensor) -> Tensor:
    """`x` where 16 bytes can be read at a time, a copy elsewhere."""
    odd = x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:-1])
    return x.clone(memory_format=torch.contiguous_format) if odd else x


def _up_to(few_rows: int) -> Callable[..., Tensor]:
    """Rows up to so many are spread over clusters."""

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
        rows = prefix.shape[0]
        out = torch.empty((rows, DIM), dtype=prefix.dtype, device=prefix.device)
        if not rows:
            return out
        if num_blocks > WIDE_BLOCKS:
            raise UnsupportedError(
                f"nvidia.hopper mixes at most {WIDE_BLOCKS} blocks, these are {num_blocks}",
                hint="choose another provider of attn_res_mix with --ops",
            )
        own_prefix, own_blocks = _aligned(prefix), _aligned(blocks)
        added = own_prefix if delta is None else _aligned(delta)
        norm, key = out if out_weight is None else _aligned(out_weight), _aligned(key_weight)
        few = rows <= few_rows
        launched, threads, processors = _kernel(few, num_blocks > MOST_BLOCKS, prefix.get_device())
        arguments = ARGUMENTS.pack(
            own_prefix.data_ptr(), own_blocks.data_ptr(), out.data_ptr(), added.data_ptr(), norm.data_ptr(),
            key.data_ptr(), own_prefix.stride(0), added.stride(0), own_blocks.stride(0), own_blocks.stride(1),
            rows, num_blocks, reset, delta is not None, store, out_weight is not None, eps, out_eps,
        )  # fmt: skip
        launched.launch((rows * SPREAD if few else min(rows, processors), 1), threads, arguments)
        if own_prefix is not prefix and delta is not None:
            prefix.copy_(own_prefix)
        if own_blocks is not blocks and store:
            blocks[num_blocks].copy_(own_blocks[num_blocks])
        return out

    return attn_res_mix


attn_res_mix = provides(
    "attn_res_mix",
    name="hopper",
    needs=Needs(dtypes=("bfloat16",)),
    supports=_supports,
    graph_safe=True,
    tactics={"stream": _up_to(0), "spread": _up_to(1 << 20)},
)(_up_to(FEW_ROWS))
