"""Builds a model on a switchboard: bound with the bad providers, switchable to the good ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3hal.debug.bisect import Bisection
from k3hal.debug.drive import Driver
from k3hal.debug.switchboard import Switchboard
from k3hal.debug.target import CURRENT
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.observe import observing
from k3hal.engine.build import BuiltEngine, build_engine
from k3hal.errors import UsageError

THRESHOLDS = {"float32": 1e-3, "bfloat16": 5e-2}
"""Logits that differ by more are called divergent: what rounding in another order does not explain."""


def overrides_of(name: str, flag: str) -> str | None:
    """`current` is no override, a word is that provider for every operator, anything with `=` is overrides."""
    if name == CURRENT:
        return None
    if not name:
        raise UsageError(f"{flag} is empty", hint="reference, current, a provider or backend, or overrides")
    return name if "=" in name else f"*={name}"


class LiveModel:
    """A loaded model with its switchboard. Close it when done."""

    def __init__(self, model: str | None, good: str, bad: str, **options: Any) -> None:
        """Raises what loading a model raises, and `UsageError` for a malformed side."""
        self.board = Switchboard(build_selector(overrides_of(good, "--good"), "warn"))
        with observing(self.board):
            self.built: BuiltEngine = build_engine(model, ops=overrides_of(bad, "--bad"), fallback="warn", **options)

    def bisection(self, token_ids: Sequence[int], decodes: int, threshold: float | None = None) -> Bisection:
        """The sequence's last `decodes` tokens are decoded, the others are prefilled."""
        info, limit = self.built.engine.info, THRESHOLDS[self.built.plan.dtype]
        if not 1 <= len(token_ids) <= info.max_model_len:
            raise UsageError(f"the prompt has {len(token_ids)} tokens", hint=f"from 1 to {info.max_model_len}")
        if any(not 0 <= token < info.vocab_size for token in token_ids):
            raise UsageError(f"a token id of the prompt is not in 0 .. {info.vocab_size - 1}")
        driver = Driver(self.built.runner)
        return Bisection(self.board, driver, token_ids, min(decodes, len(token_ids) - 1), threshold or limit)

    def close(self) -> None:
        self.built.engine.close()
