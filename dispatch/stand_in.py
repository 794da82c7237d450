"""The GPU that tensors on none stand for: those on `meta` while kernels are compiled for a machine that is not here,
those on the CPU while one is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StandIn:
    """What a launch asks of a GPU: `arch` is the vendor's name (`sm_90`, `gfx950`), `shared_memory` bytes a program may
    have, `processors` how many multiprocessors or compute units there are."""

    arch: str
    processors: int
    shared_memory: int

    @property
    def properties(self) -> dict[str, int]:
        """By the names of Triton's drivers."""
        return {"multiprocessor_count": self.processors, "max_shared_mem": self.shared_memory}


_in_force: list[StandIn] = []


def stand_in() -> StandIn | None:
    """The machine in force in this process, if one is."""
    return _in_force[-1] if _in_force else None


@contextmanager
def standing_in(machine: StandIn) -> Iterator[None]:
    """Within, in every thread, a tensor that is on no GPU is one of this machine."""
    _in_force.append(machine)
    try:
        yield
    finally:
        _in_force.pop()


def stand_for(machine: StandIn) -> None:
    """As `standing_in`, for the rest of this process."""
    _in_force.append(machine)
