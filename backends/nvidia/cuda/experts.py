"""Routed experts in CUDA C++: which of its kernels take a call, by how many choices an expert has."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.nvidia.cuda.library import library
from k3hal.backends.nvidia.cuda.packing import DEPTH, ROWS
from k3hal.dispatch.errors import UnsupportedError

MOST = 4096
"""Tokens at a time: scratch is a row of the output a choice."""
FLAT = 512
"""Up to so many columns of hidden, all of K is in shared memory at once."""
RESIDENT = 384
"""The same in the ring of the kernels for many, which has three stages of 128."""
HEIGHTS = (96, 128)
"""The most choices of a tile of the two kernels for many."""
SORTED = 2048
"""Choices that one block sorts; more take two launches."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to `direct` tokens nothing is sorted and no row is written. Codes are streamed for tiles of 8 choices where an
    expert has up to `eight` on average, for tiles of 16 up to `few`. From `half` choices on, rows are rounded to
    bfloat16 before they are added up in fp32."""

    direct: int = 4
    eight: float = 5.0
    few: float = 14.0
    half: int = 8192


class Gemm(ctypes.Structure):
    """`struct Gemm` of `experts.h`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "w", "scales", "out", "weights", "ids")),
        *((name, c_void_p) for name in ("tile_expert", "tile_start", "tile_length", "rows", "tiles")),
        *((name, c_long) for name in ("x_stride", "weights_stride", "ids_stride")),
        *((name, c_int) for name in ("top_k", "k", "n")),
        *((name, c_float) for name in ("beta", "linear_beta")),
    )


class Choices(ctypes.Structure):
    """`struct Choices` of `experts_sort.h`."""

    _fields_ = (
        ("ids", c_void_p),
        ("ids_stride", c_long),
        *((name, c_int) for name in ("count", "top_k", "experts", "height")),
        *(
            (name, c_void_p)
            for name in ("tile_expert", "tile_start", "tile_length", "rows", "tiles", "counts", "ranks")
        ),
    )


@cache
def _launcher(name: str) -> Any:
    return getattr(library("experts"), name)


def _launch(name: str, device: torch.device, *args: Any) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if code := _launcher(name)(*args, c_void_p(stream)):
        raise UnsupportedError(f"CUDA refused to launch {name}: error {code}", hint="choose other providers with --ops")


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _at(x: Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())


def _rows(x: Tensor) -> Tensor:
    """x, copied if its rows do not begin at multiples of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 else x.contiguous().clone()


def sum_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    betas: tuple[float, float], limits: Limits,
) -> Tensor:  # fmt: skip
    """See `moe_experts_mxfp4`, of weights as `packing.pack` leaves them; betas (0, 0) are SwiGLU's.

    Raises `UnsupportedError` for tensors that the kernels would read or write beyond their ends.
    """
    if not _fit(x, ids, weights, (w13, w13_scale, w2, w2_scale)):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, ids, weights, w13, w13_scale, w2, w2_scale))
        raise UnsupportedError(
            f"nvidia.hopper's moe_experts_mxfp4 cannot take tensors of shapes {shapes}, their dtypes or strides",
            hint="choose other providers with --ops",
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for a in range(0, x.shape[0], MOST):
        b = a + MOST
        layer = Layer(_rows(x[a:b]), ids[a:b], weights[a:b], w13, w13_scale, w2, w2_scale, betas)
        layer.into(out[a:b], limits)
    return out


def _fit(x: Tensor, ids: Tensor, weights: Tensor, stacks: tuple[Tensor, Tensor, Tensor, Tensor]) -> bool:
    """Whether shapes, dtypes and strides are the operator's, and the elements of a piece have 32-bit places."""
    (tokens, width), w13, w2 = x.shape, stacks[0], stacks[2]
    experts, groups = w13.shape[:2]
    first = (experts, groups, -(-width // DEPTH), ROWS)
    second = (experts, width // ROWS, -(-groups * 8 // DEPTH), ROWS)
    return (
        (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        and ids.shape == weights.shape == (tokens, ids.shape[1])
        and ids.stride(1) == weights.stride(1) == 1
        and groups % 2 == width % ROWS == 0
        and tuple(t.shape for t in stacks) == ((*first, ROWS), first, (*second, ROWS), second)
        and all(t.dtype is torch.int32 and t.is_contiguous() for t in stacks)
        and min(tokens, MOST) * ids.shape[1] * max(width, groups * 8) < 1 << 31
        and max(w13.numel(), w2.numel()) < 1 << 39
    )


def _wide(each: float) -> bool:
    """Whether experts of so many choices are cut into tiles of more than 96: those of 128 are padded to 96 at least."""
    return each > 88 and each / math.ceil(each / HEIGHTS[1]) > 90


class Layer:
    """One call's tensors, and the launches it is made of."""

    def __init__(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
        betas: tuple[float, float],
    ) -> None:  # fmt: skip
        self.x, self.ids, self.weights, self.device = x, ids, weights, x.device
        (self.tokens, self.width), self.top_k = x.shape, ids.shape[1]
        self.experts, self.inner, self.choices = w13.shape[0], w13.shape[1] * 8, ids.numel()
        self.hidden = torch.empty(self.choices, self.inner, dtype=x.dtype, device=x.device)
        shared = {"weights_stride": weights.stride(0), "ids_stride": ids.stride(0), "top_k": self.top_k}
        self.gate = Gemm(
            x=_at(x), w=_at(w13), scales=_at(w13_scale), out=_at(self.hidden), x_stride=x.stride(0), k=self.width,
            n=self.inner, beta=betas[0], linear_beta=betas[1], **shared,
        )  # fmt: skip
        self.down = Gemm(
            x=_at(self.hidden), w=_at(w2), scales=_at(w2_scale), weights=_at(weights), x_stride=self.inner,
            k=self.inner, n=self.width, **shared,
        )  # fmt: skip

    def into(self, out: Tensor, limits: Limits) -> None:
        if self.tokens <= limits.direct and self.top_k <= 32 and self.inner <= FLAT:
            self._direct(out)
            return
        each = self.choices / self.experts
        few, wide = each <= limits.few, _wide(each)
        height = (8 if each <= limits.eight else 16) if few else HEIGHTS[wide]
        self._sort(height)
        # The kernels for many write bfloat16, the one that splits long rows of w2 among warps fp32.
        half = not few or (self.choices >= limits.half and self.inner <= FLAT)
        dtype = torch.bfloat16 if half else torch.float32
        parts = torch.empty(self.choices, self.width, dtype=dtype, device=self.device)
        self.down.out = _at(parts)
        if few:
            self._streamed(height, half)
        else:
            self._tall(wide)
        _launch(
            "experts_combine", self.device, _at(parts), int(half), _at(self.ids), c_long(self.ids.stride(0)),
            self.tokens, self.top_k, self.width, _at(out),
        )  # fmt: skip

    def _direct(self, out: Tensor) -> None:
        self.gate.ids = self.down.ids = _at(self.ids)
        self.down.out = _at(out)
        _launch("experts_gate_direct", self.device, ctypes.byref(self.gate), self.choices)
        _launch("experts_sum", self.device, ctypes.byref(self.down), self.tokens)

    def _sort(self, height: int) -> None:
        most, choices = min(self.choices, self.experts + self.choices // height), self.choices
        blocks = -(-choices // SORTED)
        # Expert, start and length of every tile; the sorted choices; how many tiles there are; counts and ranks.
        sizes = (
            (most, most, most, choices, 1, blocks * self.experts, choices) if blocks > 1 else (most,) * 3 + (choices, 1)
        )
        self.table, self.most = torch.empty(sum(sizes), dtype=torch.int32, device=self.device), most
        places = [self.table.data_ptr() + 4 * sum(sizes[:i]) for i in range(len(sizes))]
        for gemm in (self.gate, self.down):
            gemm.tile_expert, gemm.tile_start, gemm.tile_length, gemm.rows, gemm.tiles = places[:5]
        stride = self.ids.stride(0)
        sorted_ = Choices(self.ids.data_ptr(), stride, choices, self.top_k, self.experts, height, *places)
        _launch("experts_sort", self.device, ctypes.byref(sorted_))

    def _streamed(self, height: int, half: bool) -> None:
        _launch(f"experts_gate_{height}", self.device, ctypes.byref(self.gate), self.most)
        if self.inner <= FLAT:
            _launch(f"experts_flat_{height}", self.device, ctypes.byref(self.down), self.most, int(half))
        else:
            _launch(f"experts_deep_{height}", self.device, ctypes.byref(self.down), self.most)

    def _tall(self, wide: bool) -> None:
        blocks, repeat = _multiprocessors(self.device), 7 if self.inner <= RESIDENT else 1
        _launch("experts_gate_tall", self.device, ctypes.byref(self.gate), int(wide), 1, blocks)
        _launch("experts_down_tall", self.device, ctypes.byref(self.down), int(wide), repeat, blocks)
