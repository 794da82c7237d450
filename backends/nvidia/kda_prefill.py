"""KDA prefill on Hopper by our own kernels: operands of every chunk at once, then heads swept from chunk to chunk."""

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
from k3hal.dispatch.call import Answer, Call
from k3hal.dispatch.errors import UnsupportedError

CHUNK, THREADS, SWEEPERS, CARRIERS, LEAST_BOUND = 32, 256, 384, 512, -10.0
_ROW = 132  # Rows in shared memory, padded: of the kernel files.
OPERANDS = 3 * 35 * 256 + 32 * 256 + 5 * 16 * 272 + 32 * 272 + 32 * 36 * 4 + 4 * 128 * 4 + 4 * 32 * 4 + 8 * 4
RECORD, STAGES = 277 * 128, 4
"""Bytes of a chunk's operands of one head, in whole lines: W, Q, N, U, M, what it keeps of a state, U's scale."""
SWEEP = STAGES * (-(-RECORD // 256) * 256) + 2 * 32 * _ROW * 4
JOIN = 2 * 128 * 136 * 4 + 2 * 16 * _ROW * 4
_LEAST_SEGMENTS, _LEAST_CHUNKS = 3, 16


def _longs(names: str) -> list[tuple[str, type]]:
    return [(f"{name}_stride", ctypes.c_longlong) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class OperandArguments(ctypes.Structure):
    """`struct Arguments` of kda_operands.cu."""

    _fields_ = (
        *_pointers("qkv raw_gate beta taps rate bias conv slots starts known operands sizes"),
        *_longs("qkv gate beta conv"),
        *((name, ctypes.c_int) for name in ("count", "heads", "places")),
        ("bound", ctypes.c_float),
    )


class SweepArguments(ctypes.Structure):
    """`struct Arguments` of kda_sweep.cu."""

    _fields_ = (
        *_pointers("operands sizes state slots starts known begins carry qkv conv gate norm out"),
        *_longs("state qkv conv gate"),
        *((name, ctypes.c_int) for name in ("count", "tokens", "heads", "segments", "length", "places")),
        ("eps", ctypes.c_float),
    )


class JoinArguments(ctypes.Structure):
    """`struct Arguments` of kda_join.cu."""

    _fields_ = (
        *_pointers("state slots starts known begins carry"),
        *_longs("state"),
        *((name, ctypes.c_int) for name in ("heads", "length")),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The device's kernels, and how many multiprocessors it has."""

    operands: Kernel
    carry: Kernel
    join: Kernel
    sweep: Kernel
    processors: int


@cache
def _kernels(index: int) -> Kernels:
    return Kernels(
        kernel("kda_operands", "operands", (), OPERANDS, index),
        kernel("kda_sweep", "carry", (), SWEEP, index),
        kernel("kda_join", "join", (), JOIN, index),
        kernel("kda_sweep", "sweep", (), SWEEP, index),
        torch.cuda.get_device_properties(index).multi_processor_count,
    )


def _supports(call: Call) -> Answer:
    return supports(call, *([] if call.dims.get("bounded", True) else ["needs a bounded gate"]))


def segment_length(rows: int, count: int, heads: int, processors: int) -> int:
    """Tokens a segment, a multiple of a chunk, such that all segments of all heads fill the multiprocessors once; 0
    where there is nothing to gain. What it takes to find how a segment changes a state is another sweep."""
    wanted = processors // heads - (count - 1)
    if wanted < _LEAST_SEGMENTS or rows < _LEAST_CHUNKS * CHUNK:
        return 0
    return -(-rows // (wanted * CHUNK)) * CHUNK


def _taken(lower_bound: float | None) -> float:
    if lower_bound is None or lower_bound < LEAST_BOUND:
        raise UnsupportedError(
            f"hopper's kda_prefill takes bounds from {LEAST_BOUND:g} on, this is {lower_bound}",
            hint="choose other providers with --ops",
        )
    return lower_bound


def _sweep(
    kernels: Kernels, arguments: SweepArguments, joined: JoinArguments | None, heads: int, parts: int, count: int
) -> None:
    if joined is not None:
        kernels.carry.launch((heads, parts), CARRIERS, arguments, overlapped=True)
        kernels.join.launch((heads * 8, count), THREADS, joined, overlapped=True)
    kernels.sweep.launch((heads, parts + 1), SWEEPERS, arguments, overlapped=True)


def _put_back(*caches: tuple[Tensor, Tensor]) -> None:
    """What was worked on as a copy goes to where it came from."""
    for cache_, copy in caches:
        if copy is not cache_:
            cache_.copy_(copy)


def _of(segments: bool = True) -> Callable[..., Tensor]:
    def kda_prefill(
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
        cu_seqlens: Tensor,
        has_state: Tensor,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        """See the operator. Prepared by `laid_out`. A cache whose slots are not aligned is worked on as a copy."""
        bound = _taken(lower_bound)
        (rows, heads, dim), device = raw_gate.shape, qkv.device
        out = torch.empty((rows, heads * dim), dtype=qkv.dtype, device=device)
        if not rows:
            return out
        kernels = _kernels(qkv.get_device())
        qkv, raw_gate, out_gate = aligned(qkv), aligned(raw_gate), aligned(out_gate)
        past, held = aligned(conv_state), aligned(state)
        count = slots.shape[0]
        places = rows // CHUNK + count
        chunks = places * heads
        scratch = torch.empty((chunks * RECORD + chunks * 4,), dtype=torch.uint8, device=device)
        operands, sizes = scratch.data_ptr(), scratch.data_ptr() + chunks * RECORD
        sequences = slots.data_ptr(), cu_seqlens.data_ptr(), has_state.data_ptr()
        if count:
            inputs = qkv, raw_gate, beta_logits, conv_weight, A_log, dt_bias, past
            strides = (x.stride(0) for x in (qkv, raw_gate, beta_logits, past))
            pointers = *(x.data_ptr() for x in inputs), *sequences, operands, sizes
            given = OperandArguments(*pointers, *strides, count, heads, places, bound)
            kernels.operands.launch((heads, places), THREADS, given)
        length = segment_length(rows, count, heads, kernels.processors) if segments else 0
        parts = rows // length + count if length else count
        # What segments begin with, then what each adds to a state and makes of one.
        states = torch.empty((3 if length else 0, parts, heads, dim, dim), dtype=torch.float32, device=device)
        begins, carried = states.data_ptr(), states.data_ptr() + parts * heads * dim * dim * 4
        arguments = SweepArguments(
            operands, sizes, held.data_ptr(), *sequences, begins, carried, qkv.data_ptr(), past.data_ptr(),
            out_gate.data_ptr(), norm_weight.data_ptr(), out.data_ptr(), held.stride(0), qkv.stride(0), past.stride(0),
            out_gate.stride(0), count, rows, heads, parts, length, places, eps,
        )  # fmt: skip
        joined = JoinArguments(held.data_ptr(), *sequences, begins, carried, held.stride(0), heads, length)
        _sweep(kernels, arguments, joined if length else None, heads, parts, count)
        _put_back((conv_state, past), (state, held))
        return out

    return kda_prefill


kda_prefill = provides(
    "kda_prefill", name="hopper", needs=Needs(dtypes=("bfloat16",)), supports=_supports, prepare=laid_out,
    graph_safe=True, tactics={"whole_sequences": _of(segments=False)},
)(_of())  # fmt: skip
