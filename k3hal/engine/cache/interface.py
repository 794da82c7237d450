"""What the scheduler asks of a cache. Sequences are rows; every call gives all a sequence needs or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from k3hal.engine.cache.keys import PrefixContext, UnitKeys
from k3hal.engine.cache.stats import CacheStats
from k3hal.engine.tier.interface import TierStats, TransferDone, Transfers

NEVER = 2**62
"""A position no sequence reaches."""


def _no_pages() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Pages to copy before a step's forward pass, as if all reads came before all writes.

    `src` and `dst` int64, same length, `dst` without repeats.
    """

    src: np.ndarray = field(default_factory=_no_pages)
    dst: np.ndarray = field(default_factory=_no_pages)

    def __len__(self) -> int:
        return self.src.size


class SequenceCache(Protocol):
    """Page tables and state slots of the running sequences.

    `page_table` int32 [rows, max pages] (entries past a row's pages are arbitrary), `num_pages` and `slots` int32
    [rows]; a row without a sequence has slot 0. The scheduler reads these and never writes them. `page_tokens` is the
    number of tokens in a page.
    """

    page_tokens: int
    page_table: np.ndarray
    num_pages: np.ndarray
    slots: np.ndarray

    stats: CacheStats

    @property
    def usage(self) -> float:
        """Fraction of the memory that is held by sequences."""
        ...

    @property
    def cached_usage(self) -> float:
        """Fraction of the memory that is held for later sequences only."""
        ...

    @property
    def tier_stats(self) -> TierStats | None:
        """What the external tier counts; None without one."""
        ...

    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        ...

    next_stop: np.ndarray
    """int64 [rows]: how many tokens a row will have computed when `reach` must be called, `NEVER` for never."""

    def keys(self, context: PrefixContext = ...) -> UnitKeys:
        """What names a sequence's prefixes; kept with the sequence and given to `admit`, it is computed once."""
        ...

    def defer(self, token_ids: np.ndarray, keys: UnitKeys) -> bool:
        """Whether a sequence better waits: a longer prefix of it than there is now is about to come.

        A running sequence is about to leave it, and stops there, on its way or at its end; or the external tier has it.
        Either way the wait ends.
        """
        ...

    def leave(self, keys: UnitKeys) -> None:
        """A sequence waits no longer and is not admitted either."""
        ...

    def expect(self, row: int, token_ids: np.ndarray, keys: UnitKeys) -> None:
        """Another sequence waits: the row's prompt shall stop where that one parts from it, if it still comes by."""
        ...

    def admit(
        self,
        row: int,
        token_ids: np.ndarray,
        reserve_pages: int = 0,
        context: PrefixContext = ...,
        keys: UnitKeys | None = None,
        *,
        resumed: bool = False,
    ) -> int | None:
        """Give a free row its slot and the pages of all its tokens, and return how many tokens are already computed.

        None, with nothing changed, when that does not fit beside `reserve_pages` pages that must stay free. `keys`
        stand in for the context. A `resumed` sequence was preempted before and counts apart.
        """
        ...

    def chunk_end(self, row: int, start: int, end: int) -> int:
        """Where a prefill chunk that begins at `start` and may go to `end` shall end; after `start`."""
        ...

    def reach(self, row: int, token_ids: np.ndarray) -> None:
        """A row has computed exactly `token_ids`. To be called at each `next_stop`, when the step has ended."""
        ...

    def extend(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in total. False, with nothing changed for any row, when there is none."""
        ...

    def release(self, row: int, token_ids: np.ndarray | None = None, *, preempted: bool = False) -> None:
        """Take back everything a row holds. The step that last wrote it must have ended.

        `token_ids` are what it has computed, whose state may be kept for others; None keeps nothing of it, nor of what
        it started from, because its state cannot be trusted.
        """
        ...

    def forget(self) -> None:
        """Keep nothing beside what rows hold: a step that moved memory failed."""
        ...

    def take_copies(self) -> PageCopies:
        """The copies owed since the last call. They must run before the next forward pass, in the same step."""
        ...

    @property
    def transferring(self) -> bool:
        """Whether the external tier needs steps, even ones without a sequence."""
        ...

    def take_transfers(self) -> Transfers:
        """The movements to and from the external tier owed since the last call, for the same step as its copies."""
        ...

    def transferred(self, ended: Iterable[TransferDone]) -> None:
        """Movements ended. Ends that nobody waits for are ignored."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait that long for the external tier, or shorter when something comes."""
        ...

    def close(self) -> None:
        """Nothing is asked any more: let the external tier write what it has to."""
        ...
