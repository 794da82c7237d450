"""What is worth remembering: the interface of retention policies, and the simple ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.cache.snapshots import SnapshotTable


class Kind(IntEnum):
    """What a snapshot was taken for."""

    PROMPT_END = 0
    JUNCTION = 1
    BOUNDARY = 2
    SPACING = 3
    INTERVAL = 4
    SEQUENCE_END = 5
    PREEMPTED = 6
    NEAR_END = 7
    AWAITED = 8


@dataclass(frozen=True, slots=True)
class Stop:
    """A token position at which a chunk should end so that the state there can be kept."""

    position: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What is known of a prompt as it is admitted, in tokens.

    `cached` are not computed; `matched` have their KV here (a snapshot at that position was missing if `matched` is
    larger); `seen` began some earlier prompt, whether or not anything of it is left: one of `donor` tokens, if it was
    only one, else `donor` is 0. `boundaries` are hints of the caller's. States are found again at multiples of `unit`,
    the match unit, and where a sequence or a message ends.
    """

    num_tokens: int
    cached: int
    matched: int
    seen: int
    donor: int
    boundaries: tuple[int, ...]
    names: PrefixNames
    memo: list[Any] = field(default_factory=list)
    """What a policy noted of this prompt, for its own later use."""

    @property
    def unit(self) -> int:
        return self.names.unit

    @property
    def last(self) -> int:
        """The last multiple of the unit from which this very prompt could start again."""
        return (self.num_tokens - 1) // self.unit * self.unit


class RetentionPolicy(Protocol):
    """Where snapshots are taken and which is given up first. One instance serves one cache."""

    name: str
    shares: bool
    """Whether a prompt stops where another that came meanwhile begins to differ from it, and that one waits for it."""

    def stops(self, facts: PromptFacts) -> list[Stop]:
        """Where to take snapshots while a prompt is computed; positions not after `facts.cached` are ignored."""
        ...

    def next_decode_stop(self, position: int, unit: int) -> int | None:
        """Where to take the next snapshot after `position` while a sequence decodes."""
        ...

    def keeps_end(self, num_tokens: int, *, preempted: bool) -> bool:
        """Whether the state after a sequence's last computed token is kept when it ends, or is to come back."""
        ...

    def scores(self, table: SnapshotTable, entries: np.ndarray, now: float) -> np.ndarray:
        """float64, one for each of `entries`: the lowest is given up first."""
        ...

    def added(self, table: SnapshotTable, entry: int, name: bytes) -> None:
        """A snapshot of the prefix called `name` is about to be taken."""
        ...

    def ending(self, table: SnapshotTable, facts: PromptFacts, whole: PrefixNames, num_tokens: int) -> None:
        """A sequence ends with `num_tokens` computed, before its end is kept if it is. `whole` names all of it."""
        ...

    def reused(self, table: SnapshotTable, entry: int, now: float) -> None:
        """A prompt begins with the snapshot; `used` is still that from before."""
        ...

    def dropped(self, table: SnapshotTable, entry: int, now: float) -> None:
        """The snapshot was given up."""
        ...


class Recency:
    """The parts that policies without a model of reuse share: what was used least recently goes first."""

    name = "recency"
    shares = True

    def stops(self, facts: PromptFacts) -> list[Stop]:
        return []

    def next_decode_stop(self, position: int, unit: int) -> int | None:
        return None

    def keeps_end(self, num_tokens: int, *, preempted: bool) -> bool:
        return preempted

    def scores(self, table: SnapshotTable, entries: np.ndarray, now: float) -> np.ndarray:
        return table.used[entries]

    def added(self, table: SnapshotTable, entry: int, name: bytes) -> None:
        """Its time is in the table."""

    def ending(self, table: SnapshotTable, facts: PromptFacts, whole: PrefixNames, num_tokens: int) -> None:
        """How it ends makes no difference."""

    def reused(self, table: SnapshotTable, entry: int, now: float) -> None:
        """Recency is all there is to learn."""

    def dropped(self, table: SnapshotTable, entry: int, now: float) -> None:
        """Nothing was expected of it."""


class Nothing(Recency):
    """No snapshot at all."""

    name = "none"
    shares = False

    def keeps_end(self, num_tokens: int, *, preempted: bool) -> bool:
        return False


class PromptEnd(Recency):
    """One snapshot a prompt, at its last multiple of the unit."""

    name = "prompt"

    def stops(self, facts: PromptFacts) -> list[Stop]:
        return [Stop(facts.last, Kind.PROMPT_END)]


class SecondHit(Recency):
    """Marconi: where a prompt leaves what is known, and after the last decoded token."""

    name = "second-hit"

    def stops(self, facts: PromptFacts) -> list[Stop]:
        return [Stop(facts.matched, Kind.JUNCTION)]

    def keeps_end(self, num_tokens: int, *, preempted: bool) -> bool:
        return True


class Interval(Recency):
    """Every `tokens` tokens of prompt and output, and at the prompt's last multiple of the unit."""

    def __init__(self, tokens: int) -> None:
        self.name = f"interval:{tokens}"
        self._tokens = tokens

    def stops(self, facts: PromptFacts) -> list[Stop]:
        step = self._step(facts.unit)
        first = facts.cached // step * step + step
        stops = [Stop(at, Kind.INTERVAL) for at in range(first, facts.last, step)]
        return [*stops, Stop(facts.last, Kind.PROMPT_END)]

    def next_decode_stop(self, position: int, unit: int) -> int | None:
        step = self._step(unit)
        return position // step * step + step

    def _step(self, unit: int) -> int:
        """The interval, up to a whole number of match units: states elsewhere would hardly be found again."""
        return -(-self._tokens // unit) * unit
