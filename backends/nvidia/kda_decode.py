"""KDA decode on Hopper by our own kernels: blocks for every head of every row, or a ring of states on their way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from k3hal.backends.nvidia._kda import aligned, laid_out, supports
from k3hal.backends.nvidia.native.library import Kernel, kernel
from k3hal.dispatch import Needs, provides

THREADS, WIDE, QUARTER, RESIDENT = 256, 512, 128, 2
QUARTERED = 24
"""Heads of all rows up to which four blocks share each; two do up to half of the multiprocessors."""
WAYS = ("ring", "each", "wide", "halves", "quarters")
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
        *((name, ctypes.c_int) for name in ("heads", "rows", "bounded", "places", "resident")),
        ("bound", ctypes.c_float),
        ("eps", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """The device's kernels, and how many multiprocessors it has."""

    ring: Kernel
    each: Kernel
    wide: Kernel
    halves: Kernel
    quarters: Kernel
    processors: int


@cache
def _kernels(index: int) -> Kernels:
    return Kernels(
        kernel("kda_decode", "decode", (), RING + INPUTS, index),
        kernel("kda_decode", "decode_each", (), 0, index),
        kernel("kda_decode", "decode_wide", (), 0, index),
        kernel("kda_decode", "decode_halves", (), 0, index),
        kernel("kda_decode", "decode_quarters", (), 0, index),
        torch.cuda.get_device_properties(index).multi_processor_count,
    )


def _best(units: int, processors: int) -> str:
    """By heads of all rows: as an H200 measured them at 6, 12, 24, 32, 48, 60, 96, 192, 768, 3072 and more."""
    if units <= min(QUARTERED, processors // 4):
        return "quarters"
    if units <= processors // 2:
        return "halves"
    if units <= processors:
        return "wide"
    return "ring" if units <= 8 * processors else "each"


def _launch(kernels: Kernels, way: str, heads: int, rows: int, arguments: Arguments) -> None:
    if way == "ring":
        grid = (min(heads * rows, RESIDENT * kernels.processors), 1)
        kernels.ring.launch(grid, THREADS, arguments, overlapped=True)
    elif way == "halves":
        kernels.halves.launch((2 * heads, rows), THREADS, arguments, overlapped=True)
    elif way == "quarters":
        kernels.quarters.launch((4 * heads, rows), QUARTER, arguments, overlapped=True)
    elif way == "wide":
        kernels.wide.launch((heads, rows), WIDE, arguments, overlapped=True)
    else:
        kernels.each.launch((heads, rows), THREADS, arguments, overlapped=True)


def _of(way: str = "") -> Callable[..., Tensor]:
    """`way` is one of `WAYS`; by the number of heads of all rows if empty."""

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
        kernels = _kernels(qkv.get_device())
        qkv, raw_gate, out_gate = aligned(qkv), aligned(raw_gate), aligned(out_gate)
        past, held = aligned(conv_state), aligned(state)
        arguments = Arguments(
            qkv.data_ptr(), raw_gate.data_ptr(), beta_logits.data_ptr(), out_gate.data_ptr(), conv_weight.data_ptr(),
            A_log.data_ptr(), dt_bias.data_ptr(), norm_weight.data_ptr(), past.data_ptr(), held.data_ptr(),
            slots.data_ptr(), out.data_ptr(), qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0),
            out_gate.stride(0), past.stride(0), held.stride(0), heads, rows, lower_bound is not None,
            held.shape[0], RESIDENT * kernels.processors, lower_bound or 0.0, eps,
        )  # fmt: skip
        _launch(kernels, way or _best(heads * rows, kernels.processors), heads, rows, arguments)
        for cache_, copy in ((conv_state, past), (state, held)):
            if copy is not cache_:
                cache_.copy_(copy)
        return out

    return kda_decode


kda_decode = provides(
    "kda_decode", name="hopper", needs=Needs(dtypes=("bfloat16",)), supports=supports, prepare=laid_out,
    graph_safe=True, tactics={way: _of(way) for way in WAYS},
)(_of())  # fmt: skip
