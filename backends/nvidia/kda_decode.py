"""KDA decode on Hopper by our own kernels: states on their way to every multiprocessor, or a head over four of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from k3hal.backends.nvidia._kda import aligned, laid_out, supports
from k3hal.backends.nvidia.native.library import Kernel, kernel
from k3hal.dispatch import Needs, provides

THREADS, BLOCKS, RESIDENT = 256, 4, 2
RING, INPUTS = 3 * 64 * 128 * 4, THREADS * (4 * 8 + 5 * 4)


class Arguments(ctypes.Structure):
    """`struct Arguments` of the kernel file."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "qkv", "raw_gate", "beta", "out_gate", "taps", "rate", "bias", "norm", "conv", "state", "slots", "out"
            )
        ),
        *(
            (f"{name}_stride", ctypes.c_longlong)
            for name in ("qkv", "gate", "beta", "out_gate", "conv", "state")
        ),
        *((name, ctypes.c_int) for name in ("heads", "rows", "bounded")),
        ("bound", ctypes.c_float),
        ("eps", ctypes.c_float),
    )  # fmt: skip


@cache
def _kernels(index: int) -> tuple[Kernel, Kernel, int]:
    """For many rows and for few, and how many blocks of the first the device holds at a time."""
    processors = torch.cuda.get_device_properties(index).multi_processor_count
    many = kernel("kda_decode", "decode", (), RING + INPUTS, index)
    return many, kernel("kda_decode", "decode_few", (), 0, index), processors * RESIDENT


def _of(few_up_to: float) -> Callable[..., Tensor]:
    """`few_up_to`: heads of all rows, as a share of the blocks that the device holds, that are spread over clusters."""

    def kda_decode(
        qkv: Tensor,
        raw_gate: Tensor,
        beta_logits: Tensor,
        out_gate: Tensor,
        conv_weight: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        """See the operator. Prepared by `laid_out`. A cache whose slots are not aligned is worked on as a copy."""
        rows, heads, dim = raw_gate.shape
        out = torch.empty((rows, heads * dim), dtype=qkv.dtype, device=qkv.device)
        if not rows:
            return out
        many, few, resident = _kernels(qkv.get_device())
        qkv, raw_gate, out_gate = aligned(qkv), aligned(raw_gate), aligned(out_gate)
        past, held = aligned(conv_state), aligned(state)
        arguments = Arguments(
            qkv.data_ptr(), raw_gate.data_ptr(), beta_logits.data_ptr(), out_gate.data_ptr(), conv_weight.data_ptr(),
            A_log.data_ptr(), dt_bias.data_ptr(), norm_weight.data_ptr(), past.data_ptr(), held.data_ptr(),
            slots.data_ptr(), out.data_ptr(), qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0),
            out_gate.stride(0), past.stride(0), held.stride(0), heads, rows, lower_bound is not None,
            lower_bound or 0.0, eps,
        )  # fmt: skip
        if heads * rows <= few_up_to * resident:
            few.launch((heads * BLOCKS, rows), THREADS, arguments, overlapped=True)
        else:
            many.launch((min(heads * rows, resident), 1), THREADS, arguments, overlapped=True)
        for cache_, copy in ((conv_state, past), (state, held)):
            if copy is not cache_:
                cache_.copy_(copy)
        return out

    return kda_decode


kda_decode = provides(
    "kda_decode", name="hopper", needs=Needs(dtypes=("bfloat16",)), supports=supports, prepare=laid_out,
    graph_safe=True, tactics={"ring": _of(0.0), "clusters": _of(1e9)},
)(_of(1.0))  # fmt: skip
