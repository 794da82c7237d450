"""What limits the tokens a request may produce: a grammar, to those who give it; to the engine, masks."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ConstraintError(Exception):
    """A constraint cannot be followed any further: its sequence has to end."""


class DeadEndError(ConstraintError):
    """No token may come next though the output is not complete: the constraint itself leads nowhere."""


class Matcher(Protocol):
    """Follows the output of one sequence. Used by one thread at a time. Raises `ConstraintError`."""

    def fill(self, mask: np.ndarray) -> bool:
        """Write into `mask` which tokens may come next; False, with `mask` in any state, when all may.

        `mask` is int32 [ceil(V / 32)] and contiguous; token t may come iff bit t % 32 of word t // 32 is set.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on past the next token; one that was not allowed is an error."""
        ...


class Constraint(Protocol):
    """May be shared by any number of sequences."""

    def matcher(self) -> Matcher:
        """A matcher before the first token of an output. Cheap; called again when a sequence is preempted."""
        ...
