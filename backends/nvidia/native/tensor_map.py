"""Tensors as the unit of Hopper that copies tiles sees them."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from k3hal.backends.nvidia.native.library import _checked, _driver

MAP_BYTES, _ALIGNED = 128, 64
_BF16, _SWIZZLE_128, _PROMOTE_256 = 9, 3, 3
"""Of the driver's header: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion."""


@lru_cache(maxsize=1024)
def swizzled_pages(address: int, pages: int, page: int, channels: int, page_bytes: int, box: tuple[int, int]) -> bytes:
    """A `CUtensorMap` of bf16 [pages, page, channels], rows dense and pages `page_bytes` apart.

    A copy brings `box` = (rows, channels) of one page; 128 bytes of channels, whose 16-byte parts are swizzled by row.
    Address and `page_bytes` are multiples of 16.
    """
    memory = (ctypes.c_ubyte * (MAP_BYTES + _ALIGNED))()
    at = (ctypes.addressof(memory) + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    sizes = (ctypes.c_uint64 * 3)(channels, page, pages)
    strides = (ctypes.c_uint64 * 2)(channels * 2, page_bytes)
    boxes, ones = (ctypes.c_uint32 * 3)(box[1], box[0], 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), _BF16, 3, ctypes.c_void_p(address), sizes, strides, boxes, ones, 0, _SWIZZLE_128,
        _PROMOTE_256, 0,
    )  # fmt: skip
    _checked(status, "cuTensorMapEncodeTiled")
    return ctypes.string_at(at, MAP_BYTES)
