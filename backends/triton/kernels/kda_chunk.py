"""Launches of the chunked delta rule, alone and with the convolution, the gates and the norm of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from k3hal.backends.triton.kernels._chunk_operands import chunk_operands
from k3hal.backends.triton.kernels._chunk_products import chunk_products
from k3hal.backends.triton.kernels._chunk_scan import chunk_scan, gated_norm
from k3hal.backends.triton.kernels._chunk_sweep import chunk_sweep, join_segments
from k3hal.backends.triton.kernels._kda import at_most
from k3hal.backends.triton.kernels.programs import is_amd, resident

NORM_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """How chunks of `chunk` tokens are worked on: `part` channels of the products at a time, `columns`
    of the state a program, warps of both, stages of the scan.

    Of chunks of 64 Triton makes wgmma with an operand in registers, which ptxas before 13.3 may use again too early
    (triton-lang/triton#11781): with them heads of 32 met an illegal memory access on an H200. Of 32 it makes none."""

    chunk: int = 32
    part: int = 64
    columns: int = 32
    warps: int = 8
    scan_warps: int = 4
    stages: int = 2
    half: bool = True
    operand_warps: int = 4
    operand_registers: int = 255
    sweep_warps: int = 8
    segments: int = 0
    exact: str = "exact"


EXACT = Tiles(part=32, columns=16, scan_warps=8, stages=1)
"""For exact products, which hold their operands in registers."""


@dataclass(frozen=True, slots=True)
class _Sequences:
    slots: Tensor
    starts: Tensor
    known: Tensor


def _products(
    tensors: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    of: _Sequences,
    dims: tuple[int, int, int],
    lower_bound: float | None,
    fused: bool,
    base: int,
    tiles: Tiles,
) -> tuple[Tensor, ...]:
    """`tensors` q, k, v, g, beta and `weights` taps, rate, dt_bias, conv_state as `chunk_products` takes them."""
    q, taps = tensors[0], weights[0]
    (rows, heads, dim), device = dims, q.device
    count, chunk = of.slots.shape[0], tiles.chunk
    exact = not fused or q.dtype is torch.float32
    # A split operand lies in two planes.
    kind, planes = (torch.float32, 1) if exact else (torch.bfloat16, 2)
    places = rows // chunk + count
    w, n = (torch.empty((planes, places, heads, chunk, dim), dtype=kind, device=device) for _ in range(2))
    # The result is rounded to bfloat16 itself: what only it depends on need not be split.
    q_decayed = torch.empty((places, heads, chunk, dim), dtype=kind, device=device)
    m = torch.empty((places, heads, chunk, chunk), dtype=kind, device=device)
    u = torch.empty((places, heads, chunk, dim), dtype=torch.float32, device=device)
    keep = torch.empty((places, heads, dim), dtype=torch.float32, device=device)
    chunk_products[(heads, places)](
        *tensors, *weights, of.slots, of.starts, of.known, w, u, q_decayed, n, m, keep,
        *(x.stride(0) for x in tensors), weights[3].stride(0), count, heads, lower_bound or 0.0,
        fused, lower_bound is not None, taps.shape[0] if fused else 2, dim, min(tiles.part, dim), chunk, base,
        tiles.exact if exact else "half", tiles.exact if exact else "split", num_warps=tiles.warps, num_stages=1,
    )  # fmt: skip
    return w, u, q_decayed, n, m, keep


def _stages(tiles: Tiles, device: torch.device) -> int:
    """One on AMD, whose multiprocessors have no room for the operands of two chunks."""
    return 1 if is_amd(device) else tiles.stages


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    tiles: Tiles,
) -> Tensor:
    """See the operator. All products are of fp32: nothing here rounds its inputs, so a state is judged as fp32."""
    rows, heads, dim = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    of, count = _Sequences(slots, cu_seqlens, has_state.view(torch.uint8)), slots.shape[0]
    if not rows:
        return out
    weights = (g, g, g, state)  # Not read.
    products = _products((q, k, v, g, beta), weights, of, (rows, heads, dim), None, False, 1, tiles)
    columns = min(tiles.columns, dim)
    chunk_scan[(dim // columns, heads, count + 1)](
        *products, state, slots, cu_seqlens, of.known, q, state, v, g, out,
        state.stride(0), 0, 0, 0, count, rows, heads, 0.0,
        False, False, 2, 1, dim, tiles.chunk, columns, tiles.exact, tiles.exact, _stages(tiles, v.device),
        num_warps=tiles.scan_warps,
    )  # fmt: skip
    return out


def _segment_length(rows: int, count: int, heads: int, chunk: int, device: torch.device) -> int:
    """Tokens a segment, a multiple of a chunk, such that all segments of all heads fill the multiprocessors once; 0
    where there is nothing to gain. What it takes to find how a segment changes a state is another sweep."""
    wanted = resident(device, 1) // heads - (count - 1)
    return triton.cdiv(triton.cdiv(rows, wanted), chunk) * chunk if wanted >= 3 and rows >= 16 * chunk else 0


def _in_half(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    conv_state: Tensor,
    state: Tensor,
    of: _Sequences,
    lower_bound: float,
    eps: float,
    out: Tensor,
    tiles: Tiles,
) -> None:
    """`weights` are taps, rate, dt_bias and the norm's."""
    (rows, heads, dim), device, chunk = raw_gate.shape, qkv.device, tiles.chunk
    taps, rate, dt_bias, norm_weight = weights
    count, width = of.slots.shape[0], taps.shape[0]
    places = rows // chunk + count
    w, u, q, n = (torch.empty((places, heads, chunk, dim), dtype=torch.float16, device=device) for _ in range(4))
    m = torch.empty((places, heads, chunk, chunk), dtype=torch.float16, device=device)
    keep = torch.empty((places, heads, dim), dtype=torch.float32, device=device)
    sizes = torch.empty((heads, places), dtype=torch.float32, device=device)
    chunk_operands[(heads, places)](
        qkv, raw_gate, beta_logits, taps, rate, dt_bias, conv_state, of.slots, of.starts, of.known,
        w, u, q, n, m, keep, sizes,
        qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0), conv_state.stride(0), count, heads, lower_bound,
        width, dim, chunk, min(16, chunk), "split" if is_amd(device) else "tf32",
        num_warps=tiles.operand_warps, num_stages=1, **at_most(tiles.operand_registers, device),
    )  # fmt: skip
    length = tiles.segments or _segment_length(rows, count, heads, chunk, device)
    segments = rows // length + count if length else count
    shape = (segments, heads, dim, dim) if length else (1,)
    begins = torch.empty(shape, dtype=torch.float32, device=device)
    carry = torch.empty((2, *shape), dtype=torch.float32, device=device)

    def sweep(read: bool) -> None:
        chunk_sweep[(heads, segments + read, 1 if read else 2)](
            w, u, q, n, m, keep, sizes, state, of.slots, of.starts, of.known, begins, carry,
            qkv, conv_state, out_gate, norm_weight, out,
            state.stride(0), qkv.stride(0), conv_state.stride(0), out_gate.stride(0),
            count, rows, heads, segments, length or 1, places, eps,
            read, length > 0, width, triton.next_power_of_2(width - 1), dim, chunk, _stages(tiles, device),
            num_warps=tiles.sweep_warps,
        )  # fmt: skip

    if length:
        sweep(False)
        block = min(16, dim)
        join_segments[(dim // block, heads, count)](
            state, of.slots, of.starts, of.known, carry, begins, state.stride(0), count, heads, length,
            dim, block, "ieee" if is_amd(device) else "tf32x3", num_warps=4,
        )  # fmt: skip
    sweep(True)


def kda_prefill(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    taps: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    lower_bound: float | None,
    eps: float,
    tiles: Tiles,
) -> Tensor:
    """See the operator. `taps` [W, C] and `rate` are prepared. In fp32 the tiles are `EXACT`, whatever is asked for."""
    rows, heads, dim = raw_gate.shape
    out = torch.empty((rows, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return out
    if qkv.dtype is torch.float32:
        tiles = EXACT
    of, count, width = _Sequences(slots, cu_seqlens, has_state.view(torch.uint8)), slots.shape[0], taps.shape[0]
    if tiles.half and qkv.dtype is not torch.float32 and lower_bound is not None and lower_bound >= -10.0:
        weights = (taps, rate, dt_bias, norm_weight)
        _in_half(qkv, raw_gate, beta_logits, out_gate, weights, conv_state, state, of, lower_bound, eps, out, tiles)
        return out
    # A gate bounded further down, or not at all, meets in blocks of one token. So does fp32, for its precision.
    base = 16 if lower_bound is not None and lower_bound >= -10.0 and qkv.dtype is not torch.float32 else 1
    products = _products(
        (qkv, qkv, qkv, raw_gate, beta_logits), (taps, rate, dt_bias, conv_state), of, (rows, heads, dim),
        lower_bound, True, base, tiles,
    )  # fmt: skip
    columns = min(tiles.columns, dim)
    normed = columns == dim
    read = out if normed else torch.empty((rows, heads * dim), dtype=torch.float32, device=qkv.device)
    chunk_scan[(dim // columns, heads, count + 1)](
        *products, state, slots, cu_seqlens, of.known, qkv, conv_state, out_gate, norm_weight, read,
        state.stride(0), qkv.stride(0), conv_state.stride(0), out_gate.stride(0), count, rows, heads, eps,
        True, normed, width, triton.next_power_of_2(width - 1), dim, tiles.chunk, columns,
        *(("exact", "exact") if qkv.dtype is torch.float32 else ("split", "rounded")), _stages(tiles, qkv.device),
        num_warps=tiles.scan_warps,
    )  # fmt: skip
    if not normed:
        gated_norm[(triton.cdiv(rows * heads, NORM_ROWS),)](
            read, out_gate, norm_weight, out, read.stride(0), out_gate.stride(0), rows * heads, heads, eps,
            True, dim, dim, NORM_ROWS, num_warps=4,
        )  # fmt: skip
    return out
