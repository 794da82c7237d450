"""What a compiled kernel may take."""

from __future__ import annotations

from collections.abc import Iterator

from k3hal.conform.cross.compile import Compiled
from k3hal.conform.cross.targets import TARGETS

MOST_SPILLED = 1024
"""Bytes a thread of a kernel for prompts: more is no choice of a scheduler's but a compiler gone wrong."""


def problems(made: Compiled) -> Iterator[str]:
    """Every budget that a kernel breaks, in words."""
    target, taken = TARGETS[made.job.target], made.figures
    if taken.shared > target.shared_memory:
        yield f"takes {taken.shared} bytes of shared memory, {target.arch} has {target.shared_memory}"
    if taken.narrow_dot and not taken.matrix:
        yield f"has a product of narrow operands and none of {', '.join(target.matrix)}"
    if taken.scaled_dot and not any(target.scaled in name for name in taken.matrix if target.scaled):
        wanted = f"none of {target.scaled}" if target.scaled else f"{target.arch} has no instruction for it"
        yield f"has a product of an MX format with its scales, and {wanted}"
    # Registers that are spilled to accumulators take no memory, and are a spill all the same.
    of = f"{taken.spilled} registers, " if taken.spilled else ""
    if made.decodes and target.spills_checked and taken.scratch + taken.spilled > 0:
        yield f"spills {of}{taken.scratch} bytes a thread to memory; it decodes"
    elif target.spills_checked and taken.scratch > MOST_SPILLED:
        yield f"spills {of}{taken.scratch} bytes a thread to memory, at most {MOST_SPILLED} for prompts"
