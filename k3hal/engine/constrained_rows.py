"""The rows whose tokens are constrained: their matchers, and masks over the logits of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.constraint import Constraint, ConstraintError, Matcher
from k3hal.engine.staging import Staging


@dataclass(slots=True)
class _Row:
    """A row's matcher, or why it failed; `banned` are the words of the ids that may not come early."""

    matcher: Matcher | None
    error: ConstraintError | None
    min_tokens: int
    banned: np.ndarray


class ConstrainedRows:
    """Masks for the rows that are constrained; steps without such a row cost nothing.

    A matcher that fails ends its own sequence: the row's logits are masked as a whole, so that no token comes of them,
    and `take_failures` says why.
    """

    def __init__(self, vocab_size: int, staging: Staging) -> None:
        self._vocab_size = vocab_size
        self._staging = staging
        self._words = -(-vocab_size // 32)
        self._rows: dict[int, _Row] = {}
        self._failures: dict[int, ConstraintError] = {}

    def take_failures(self) -> dict[int, ConstraintError]:
        """Why rows gave no token since this was last asked."""
        failures, self._failures = self._failures, {}
        return failures

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def bind(
        self, row: int, constraint: Constraint, generated: np.ndarray, min_tokens: int, banned: tuple[int, ...]
    ) -> None:
        """Follow a row's output from its beginning; `generated` int64 came before the row was given to it.

        `banned` ids may come before `min_tokens` outputs only where the constraint leaves nothing else.
        """
        words = np.zeros(self._words * 32, np.uint8)
        words[list(banned)] = 1
        state = self._rows[row] = _Row(None, None, min_tokens, np.packbits(words, bitorder="little").view(np.int32))
        try:
            state.matcher = constraint.matcher()
            for token in generated.tolist():
                state.matcher.accept(token)
        except ConstraintError as error:
            _fail(state, error)

    def any(self, rows: list[int]) -> bool:
        """Whether one of `rows` is constrained."""
        return any(row in self._rows for row in rows) if self._rows else False

    def apply(self, logits: Tensor, rows: list[int], positions: np.ndarray) -> None:
        """Mask in place the logits fp32 [S, V] of the constrained rows; `positions` int64 [S] number the outputs.

        The masks are made on the host, beside whatever the device still computes of the logits.
        """
        if not self._rows:
            return
        places = [i for i, row in enumerate(rows) if row in self._rows]
        masks = np.empty((len(places), self._words), np.int32)
        used = [k for k, i in enumerate(places) if self._fill(masks[k], rows[i], int(positions[i]))]
        if not used:
            return
        words, index = self._staging.upload(masks[used], np.array([places[k] for k in used], np.int64))
        forbidden = _forbidden(words, self._vocab_size)
        if len(used) == len(rows):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)

    def record(self, rows: list[int], token_ids: list[int]) -> None:
        """Go on past the tokens just sampled; one that was not allowed fails its row."""
        for i, row in enumerate(rows) if self._rows else ():
            state = self._rows.get(row)
            if state is None or state.matcher is None or token_ids[i] < 0:
                continue
            try:
                state.matcher.accept(token_ids[i])
            except ConstraintError as error:
                _fail(state, error)

    def _fill(self, mask: np.ndarray, row: int, position: int) -> bool:
        """Fill a row's mask; False when it needs none."""
        state = self._rows[row]
        needed = True
        if state.matcher is not None:
            try:
                needed = state.matcher.fill(mask)
            except ConstraintError as error:
                _fail(state, error)
        if state.error is not None:
            self._failures[row] = state.error
            mask[:] = 0
            return True
        if position < state.min_tokens:
            if not needed:
                mask[:] = -1
            rest = mask & ~state.banned
            if rest.any():
                mask[:] = rest
            return True
        return needed


def _fail(state: _Row, error: ConstraintError) -> None:
    state.matcher, state.error = None, error


def _forbidden(words: Tensor, vocab_size: int) -> Tensor:
    """Which tokens may not come, bool [U, V], of masks int32 [U, words]."""
    if words.device.type == "cpu":
        bits = np.unpackbits(~words.numpy().view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    return ~unpacked(words, vocab_size)


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """The bits of int32 [U, words], lowest first, as bool [U, V]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_(1).view(len(words), -1)[:, :vocab_size] != 0
