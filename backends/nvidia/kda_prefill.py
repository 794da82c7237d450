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

CHUNK, THREADS, HELPERS, LEAST_BOUND = 32, 256, 128, -10.0
_ROW, _WIDE, _NARROW = 132, 272, 80  # Padded rows in shared memory: of the kernel files.
OPERANDS = 3 * 35 * 256 + 32 * 256 + 5 * 16 * _WIDE + 32 * _WIDE + 32 * 36 * 4 + 4 * 128 * 4 + 4 * 32 * 4 + 8 * 4
SWEEP = 4 * (3 * 32 * _WIDE + 128 * _NARROW + 32 * _NARROW + 128 * 4 + 16) + 2 * 32 * _ROW * 4
JOIN = 2 * 128 * 136 * 4 + 2 * 16 * _ROW * 4
RECORD = 35344
"""Bytes of a chunk's operands of one head: W, N, U, what it keeps of a state (with a copy of its size), Q and M."""
_OFFSETS = (0, 8192, 2 * 8192, 3 * 8192, 3 * 8192 + 528, 4 * 8192 + 528)
_LEAST_SEGMENTS, _LEAST_CHUNKS = 3, 16


def _longs(names: str) -> list[tuple[str, type]]:
    return [(f"{name}_stride", ctypes.c_longlong) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class OperandArguments(ctypes.Structure):
    """`struct Arguments` of kda_operands.cu."""

    _fields_ = (
        *_pointers("qkv raw_gate beta taps rate bias conv slots starts known w u q n m keep sizes"),
        *_longs("qkv gate beta conv"),
        *((name, ctypes.c_int) for name in ("count", "heads", "places")),
        ("bound", ctypes.c_float),
    )


class SweepArguments(ctypes.Structure):
    """`struct Arguments` of kda_sweep.cu."""

    _fields_ = (
        *_pointers("w u q n m keep sizes state slots starts known begins carry qkv conv gate norm out"),
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
    """The device's kernels, threads of those that sweep, and how many multiprocessors it has."""

    operands: Kernel
    carry: Kernel
    join: Kernel
    sweep: Kernel
    carry_threads: int
    sweep_threads: int
    processors: int


@cache
def _kernels(index: int, tiles: int, packed: bool) -> Kernels:
    """`tiles` of 16 rows of a state a warp; `packed` where all operands of a chunk lie one after the other."""
    macros = (f"TILES={tiles}", f"PACKED={int(packed)}")
    carry, sweep = (kernel("kda_sweep", name, macros, SWEEP, index) for name in ("carry", "sweep"))
    threads = 128 // (16 * tiles) * 32
    return Kernels(
        kernel("kda_operands", "operands", macros[1:], OPERANDS, index),
        carry,
        kernel("kda_join", "join", (), JOIN, index),
        sweep,
        2 * threads,
        threads + HELPERS,
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
        kernels.carry.launch((heads, parts), kernels.carry_threads, arguments)
        kernels.join.launch((heads * 8, count), THREADS, joined)
    kernels.sweep.launch((heads, parts + 1), kernels.sweep_threads, arguments)


def _put_back(*caches: tuple[Tensor, Tensor]) -> None:
    """What was worked on as a copy goes to where it came from."""
    for cache_, copy in caches:
        if copy is not cache_:
            cache_.copy_(copy)


def _of(segments: bool = True, tiles: int = 2, packed: bool = False) -> Callable[..., Tensor]:
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
        kernels = _kernels(qkv.get_device(), tiles, packed)
        qkv, raw_gate, out_gate = aligned(qkv), aligned(raw_gate), aligned(out_gate)
        past, held = aligned(conv_state), aligned(state)
        count = slots.shape[0]
        places = rows // CHUNK + count
        chunks = places * heads
        scratch = torch.empty((chunks * RECORD + chunks * 4,), dtype=torch.uint8, device=device)
        w, n, u, keep, q, m = (scratch.data_ptr() + i * (1 if packed else chunks) for i in _OFFSETS)
        sizes = scratch.data_ptr() + chunks * RECORD
        sequences = slots.data_ptr(), cu_seqlens.data_ptr(), has_state.data_ptr()
        if count:
            inputs = qkv, raw_gate, beta_logits, conv_weight, A_log, dt_bias, past
            strides = (x.stride(0) for x in (qkv, raw_gate, beta_logits, past))
            pointers = *(x.data_ptr() for x in inputs), *sequences, w, u, q, n, m, keep, sizes
            given = OperandArguments(*pointers, *strides, count, heads, places, bound)
            kernels.operands.launch((heads, places), THREADS, given)
        length = segment_length(rows, count, heads, kernels.processors) if segments else 0
        parts = rows // length + count if length else count
        # What segments begin with, then what each adds to a state and makes of one.
        states = torch.empty((3 if length else 0, parts, heads, dim, dim), dtype=torch.float32, device=device)
        begins, carried = states.data_ptr(), states.data_ptr() + parts * heads * dim * dim * 4
        arguments = SweepArguments(
            w, u, q, n, m, keep, sizes, held.data_ptr(), *sequences, begins, carried, qkv.data_ptr(), past.data_ptr(),
            out_gate.data_ptr(), norm_weight.data_ptr(), out.data_ptr(), held.stride(0), qkv.stride(0), past.stride(0),
            out_gate.stride(0), count, rows, heads, parts, length, places, eps,
        )  # fmt: skip
        joined = JoinArguments(held.data_ptr(), *sequences, begins, carried, held.stride(0), heads, length)
        _sweep(kernels, arguments, joined if length else None, heads, parts, count)
        _put_back((conv_state, past), (state, held))
        return out

    return kda_prefill


TACTICS = {
    "whole_sequences": _of(segments=False),
    "one_tile": _of(tiles=1),
    "packed": _of(packed=True),
    "packed_one_tile": _of(packed=True, tiles=1),
}
kda_prefill = provides(
    "kda_prefill", name="hopper", needs=Needs(dtypes=("bfloat16",)), supports=_supports, prepare=laid_out,
    graph_safe=True, tactics=TACTICS,
)(_of())  # fmt: skip
