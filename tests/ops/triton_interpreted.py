"""Judges Triton providers under the interpreter, in one process for a whole list of checks.

Standard input is a JSON list of [operator, provider with or without tactic, sample, dtype, invariant or ""]; standard
output is the list of [status, reasons].
"""

from __future__ import annotations

import json
import sys

import torch

from k3hal.backends.triton._triton import kernels
from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.invariants import check_invariant
from k3hal.debug.target import find_target
from k3hal.dispatch.ops.copy_pages import copy_pages
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator


def judged(op: str, provider: str, name: str, dtype: str, invariant: str) -> tuple[str, tuple[str, ...]]:
    operator = get_operator(op)
    (sample,) = [s for s in samples_of(operator, tags=()) if (s.name, s.dtype) == (name, dtype)]
    case = sample_case(operator, sample, 0)
    target = find_target(case, provider, probe("cpu"))
    verdict = check_invariant(invariant, case, target) if invariant else check(case, target)
    return (verdict.status, verdict.reasons) if verdict else ("nothing to try", ())


def through_scratch() -> tuple[str, tuple[str, ...]]:
    """More pages than one program holds, in rows of every alignment: reads before writes all the same."""
    kernel = kernels("copy_pages")
    count = kernel.MOST_HELD + 5
    for size, step in ((24, 24), (24, 40), (21, 22), (12, 12)):
        arena = torch.randint(0, 256, (count + 3, step), dtype=torch.uint8)[:, :size]
        wanted = arena.clone()
        src, dst = torch.arange(count), torch.arange(count) + 2
        copy_pages(wanted, src, dst)
        kernel.copy_pages(arena, src, dst, 1 << 14)
        if not torch.equal(arena, wanted):
            return "Fail", (f"pages of {size} in rows of {step}",)
    return "Pass", ()


if __name__ == "__main__":
    made = [judged(*one) for one in json.load(sys.stdin)]
    sys.stdout.write(json.dumps([*made, through_scratch()]))
