"""Absorbed MLA decoding over the paged cache: split KV, each cached row read once for all heads of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packaging.version import Version
from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, cache_supported, kernels
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call
from k3hal.dispatch.packages import INSTALLED

# rows of a tile, warps, stages, least rows of a chunk, most chunks of a sequence, programs a processor, a block's heads
Shape = tuple[int, int, int, int, int, int, int]
UPRIGHT: Shape = (64, 8, 2, 1024, 128, 1, 64)
"""For many heads, with as much shared memory as on Hopper, whose own assembler spills registers of it to memory."""
UPRIGHT_SHARED = 227 << 10
ROWS = 32
"""Of a tile, by default."""
OTHER_TILINGS: Mapping[str, Shape] = {
    "chunk1024": (32, 4, 3, 1024, 128, 2, 16),
    "warps8": (32, 8, 3, 512, 256, 2, 32),
    "rows64": (64, 4, 2, 1024, 128, 1, 16),
    "upright": UPRIGHT,
}
"""For devices of 160 KiB of shared memory a program or more; others have one tiling that fits."""


def upright_fits(arch: str, triton: str) -> bool:
    """Triton before 3.9 gives `UPRIGHT` 345 KiB of shared memory on sm_100 and sm_103, which have 227."""
    return not arch.startswith("sm_10") or Version(triton) >= Version("3.9")


AMD_TILINGS: Mapping[str, Shape] = {
    "chunk1024": (32, 4, 2, 1024, 128, 2, 16),
    "heads32": (32, 4, 1, 512, 256, 2, 32),
    "rows16": (16, 4, 1, 512, 256, 2, 16),
}
"""For CDNA: a wave has 64 lanes, and of four waves each may have 512 registers a lane, of eight only half of that."""


def _default(q: Tensor, kv_cache: Tensor) -> Shape:
    from k3hal.backends.triton.kernels.programs import arch, is_amd, is_hopper, shared_memory

    heads = 16 if q.shape[1] <= 16 else 32
    if q.element_size() == 4:  # No matrix unit multiplies fp32 exactly.
        return (16, 8, 1, 512, 256, 2, heads)
    fits = shared_memory(q.device) >= UPRIGHT_SHARED and upright_fits(arch(q.device), INSTALLED["triton"])
    if q.shape[1] > heads and kv_cache.dtype is q.dtype and fits and not is_hopper(q.device):
        return UPRIGHT
    stages = 3 if shared_memory(q.device) > 112 << 10 else 1
    # Rows of fp8 that are fetched byte by byte are too much for four warps.
    bytewise = kv_cache.element_size() == 1 and (kv_cache.stride(0) % 16 or kv_cache.shape[1] % ROWS)
    return (ROWS, 4 if is_amd(q.device) or (heads == 16 and not bytewise) else 8, stages, 512, 256, 2, heads)


def _twice(kv_cache: Tensor) -> bool:
    from k3hal.backends.triton.kernels.programs import is_hopper

    return kv_cache.element_size() == 1 and is_hopper(kv_cache.device)


def _tiled(shape: Shape | None = None, twice: bool | None = None) -> Callable[..., Tensor]:
    def mla_decode(
        q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int
    ) -> Tensor:
        """See the operator."""
        kernel = kernels("mla_decode")
        *rest, heads = shape or _default(q, kv_cache)
        tiling = kernel.Tiling(*rest, _twice(kv_cache) if twice is None else twice, heads)
        return kernel.mla_decode(q, kv_cache, page_table, seq_lens, scale, kv_lora, tiling)

    return mla_decode


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    if call.dtype == "float32":
        return {}
    if call.device.vendor == "amd":
        return {name: _tiled(shape) for name, shape in AMD_TILINGS.items()}
    tactics = {name: _tiled(shape) for name, shape in OTHER_TILINGS.items()}
    if not upright_fits(call.device.arch, call.device.packages["triton"]):
        del tactics["upright"]
    if call.dims.get("kv_dtype", call.dtype) == "float8_e4m3fn":
        tactics |= {"loaded_once": _tiled(twice=False), "loaded_twice": _tiled(twice=True)}
    return tactics


mla_decode = provides(
    "mla_decode", name="split_kv", needs=NEEDS, supports=cache_supported, graph_safe=True, tactics=_tactics
)(_tiled())
