"""The machine that tensors on `meta` stand for, while kernels are compiled for one that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


_machine: ContextVar[StandIn | None] = ContextVar("machine_of_meta", default=None)


@contextmanager
def standing_in(machine: StandIn) -> Iterator[None]:
    """Within, a tensor on `meta` is one of this machine."""
    token = _machine.set(machine)
    try:
        yield
    finally:
        _machine.reset(token)


def machine_of_meta() -> StandIn:
    """The machine in force. Raises RuntimeError where there is none: a tensor on `meta` is then a mistake."""
    machine = _machine.get()
    if machine is None:
        raise RuntimeError("a tensor on meta came to a kernel, and no machine stands behind it")
    return machine
