"""Triton's interpreter with the arithmetic of a GPU, where it has another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from k3hal.dispatch.ops.mx_dequantize import GROUP, VALUES

_NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_BITS = {1: torch.uint8, 2: torch.uint16}


def mend() -> None:
    """Change the interpreter's casts, `tl.dot`, `tl.dot_scaled` and products of bfloat16. Call once."""
    builder: Any = interpreter.InterpreterBuilder
    cast, convert = builder.cast_impl, builder.create_fp_to_fp
    dot, multiply = builder.create_dot, builder.create_fmul

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        # A handle is true or false by its values.
        narrow = _cast(source, target.scalar)
        return cast(self, source, target) if narrow is None else narrow

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        narrow = _cast(source, target.scalar)
        return convert(self, source, target, rounding) if narrow is None else narrow

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _wide(a), _wide(b), *rest)

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        product = multiply(self, _wide(a), _wide(b))
        return _cast(product, tl.bfloat16) if a.dtype.scalar == tl.bfloat16 else product

    def create_dot_scaled(
        self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, fast: Any,
        a_pack: Any, b_pack: Any, total: Any,
    ) -> Any:  # fmt: skip
        left, right = _scaled(a, a_scale), _scaled(_turned(b), b_scale)
        return interpreter.TensorHandle(total.data + left @ right.swapaxes(-1, -2), tl.float32)

    for method in (cast_impl, create_fp_to_fp, create_dot, create_fmul, create_dot_scaled):
        setattr(builder, method.__name__, method)


def _cast(source: Any, target: Any) -> Any | None:
    """fp32 to or from a narrow type, as torch rounds; None for any other pair."""
    kind = source.dtype.scalar
    if kind == tl.float32 and target in _NARROW:
        narrow = torch.from_numpy(np.ascontiguousarray(source.data)).to(_NARROW[target])
        return interpreter.TensorHandle(narrow.view(_BITS[narrow.element_size()]).numpy(), target)
    if kind in _NARROW and target == tl.float32:
        bits = torch.from_numpy(np.ascontiguousarray(source.data))
        return interpreter.TensorHandle(bits.view(_NARROW[kind]).float().numpy(), target)
    return None


def _wide(handle: Any) -> Any:
    return _cast(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _turned(handle: Any) -> Any:
    """A right operand with its columns as rows, which is how its scales come."""
    return interpreter.TensorHandle(handle.data.swapaxes(-1, -2), handle.dtype.scalar)


def _scaled(handle: Any, scales: Any) -> np.ndarray:
    """Rows of E2M1, two to a byte, the low half first, or of E4M3, times the powers of two of their groups, in fp32."""
    if handle.dtype.scalar == tl.uint8:
        codes = np.stack([handle.data & 15, handle.data >> 4], -1).reshape(*handle.data.shape[:-1], -1)
        values = np.where(codes & 8, -1, 1).astype(np.float32) * np.array(VALUES, np.float32)[codes & 7]
    else:
        values = _cast(handle, tl.float32).data  # pyright: ignore[reportOptionalMemberAccess]
    bytes_ = scales.data.astype(np.int32)
    powers = np.where(bytes_ == 255, np.float32(np.nan), np.ldexp(np.float32(1), bytes_ - 127))
    return values * np.repeat(powers.astype(np.float32), GROUP, -1)
