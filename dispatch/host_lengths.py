"""Lengths of a step's sequences as the host knows them, for libraries that take them as lists.

The engine knows them before it queues a step. Where it tells them, nobody waits for the device, and a captured graph
may hold a call that has such a list: its `replay` gives the list of the step at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Told:
    """The lengths of the sequences that decode, in the order of their rows, and the parts that were asked for."""

    lengths: Sequence[int]
    asked: list[slice] = field(default_factory=list)


_told: ContextVar[Told | None] = ContextVar("told", default=None)


@contextmanager
def telling(lengths: Sequence[int]) -> Iterator[Told]:
    """Within, these are the lengths of the sequences that decode: what `mla_decode` is given as `seq_lens`."""
    made = Told(lengths)
    token = _told.set(made)
    try:
        yield made
    finally:
        _told.reset(token)


def told() -> Told | None:
    """What is told now; None where nothing is."""
    return _told.get()


def lengths_of(seq_lens: Tensor, part: slice) -> list[int]:
    """A part of the lengths: those told, where there are as many; else fetched from the device, which is waited for."""
    known = _told.get()
    if known is None or len(known.lengths) != seq_lens.shape[0]:
        return seq_lens[part].tolist()
    known.asked.append(part)
    return list(known.lengths[part])
