"""What samples do not reach in `copy_pages`, tried under the interpreter; see `test_triton_light.py`."""

from __future__ import annotations

import torch

from k3hal.backends.triton._triton import kernels
from k3hal.dispatch.ops.copy_pages import copy_pages


def through_scratch() -> list[str]:
    """More pages than one program holds, in rows of every alignment: reads before writes all the same."""
    kernel, wrong = kernels("copy_pages"), []
    count = kernel.MOST_HELD + 5
    for size, step in ((24, 24), (24, 40), (21, 22), (12, 12)):
        arena = torch.randint(0, 256, (count + 3, step), dtype=torch.uint8)[:, :size]
        wanted = arena.clone()
        src, dst = torch.arange(count), torch.arange(count) + 2
        copy_pages(wanted, src, dst)
        kernel.copy_pages(arena, src, dst, 1 << 14)
        if not torch.equal(arena, wanted):
            wrong.append(f"pages of {size} in rows of {step}")
    return wrong


SPECIAL = (through_scratch,)
