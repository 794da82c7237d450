"""Simulated time: how long a step would have taken the model."""

from __future__ import annotations

from collections.abc import Iterable

from k3hal.bench.cache.flops import PrefillCost

STEP_SECONDS = 0.0085
"""A decode step of K3 on eight accelerators, however many sequences it has."""

FLOPS_PER_RANK = 4e14
BYTES_PER_SECOND = 1.5e12
"""Of copies inside a device's memory, read and write together."""


class StepClock:
    """Seconds since the start of a replay. A step takes its weights' time, or its prefill's where that is longer, and
    its copies' on top. Only orders of magnitude matter: policies see ages, and the figures of a report no seconds."""

    def __init__(self, cost: PrefillCost, tp: int) -> None:
        self.now = 0.0
        self._cost, self._rate = cost, tp * FLOPS_PER_RANK

    def __call__(self) -> float:
        return self.now

    def advance(self, spans: Iterable[tuple[int, int]], copied_bytes: int) -> None:
        """Let a step pass that computed the positions `[begin, end)` of each of `spans` and copied some bytes."""
        compute = sum(self._cost.tokens(begin, end) for begin, end in spans) / self._rate
        self.now += max(STEP_SECONDS, compute) + 2 * copied_bytes / BYTES_PER_SECOND
