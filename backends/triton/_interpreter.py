"""Triton's interpreter with the arithmetic of a GPU, where it has another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_BITS = {1: torch.uint8, 2: torch.uint16}


def mend() -> None:
    """Change the interpreter's casts, `tl.dot` and products of bfloat16. Call once."""
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

    for method in (cast_impl, create_fp_to_fp, create_dot, create_fmul):
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
