"""What a compiled kernel may take, and what is allowed beyond it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from k3hal.conform.cross.compile import Compiled, Done
from k3hal.conform.cross.targets import TARGETS
from k3hal.errors import BackendError

ALLOWANCES = "allowances.toml"


@dataclass(frozen=True, slots=True)
class Allowance:
    """A kernel that may spill up to `scratch` bytes a thread on these targets, and why."""

    kernel: str
    targets: tuple[str, ...]
    scratch: int
    reason: str

    def covers(self, made: Compiled) -> bool:
        return made.kernel == self.kernel and made.job.target in self.targets


@cache
def allowances() -> tuple[Allowance, ...]:
    """Those of `allowances.toml`. Raises `BackendError` for one without a reason or for a target nobody knows."""
    read = tomllib.loads((files("k3hal.conform.cross") / ALLOWANCES).read_text("utf-8"))
    found = tuple(Allowance(**{**one, "targets": tuple(one["targets"])}) for one in read["allowance"])
    for one in found:
        if not one.reason or not set(one.targets) <= set(TARGETS):
            raise BackendError(f"{ALLOWANCES}: {one.kernel} needs a reason, and targets of {', '.join(TARGETS)}")
    return found


def problems(made: Compiled) -> Iterator[str]:
    """Every budget that a kernel breaks, in words."""
    target, taken = TARGETS[made.job.target], made.figures
    if taken.shared > target.shared_memory:
        yield f"takes {taken.shared} bytes of shared memory, {target.arch} has {target.shared_memory}"
    if taken.narrow_dot and not taken.matrix:
        yield f"has a product of narrow operands and none of {', '.join(target.matrix)}"
    if made.decodes and target.spills_checked and taken.scratch + taken.spilled > 0:
        allowed = max((one.scratch for one in allowances() if one.covers(made)), default=0)
        # Registers that are spilled to accumulators take no memory, and are not allowed either.
        if taken.scratch > allowed or (taken.spilled and not allowed):
            of = f"{taken.spilled} registers, " if taken.spilled else ""
            yield f"spills {of}{taken.scratch} bytes a thread to memory; it decodes: {allowed} are allowed"


def unused(done: Iterable[Done]) -> list[Allowance]:
    """Allowances that no kernel of a whole run needed."""
    kernels = [made for one in done for made in one.kernels if made.decodes and made.figures.scratch]
    return [a for a in allowances() if not any(a.covers(made) for made in kernels)]
