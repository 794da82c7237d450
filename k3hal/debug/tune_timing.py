"""Times two functions against each other in pairs, and says whether the difference is more than noise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

ROUNDS = 15
LEAST_GAIN = 0.01
"""A smaller gain is not worth another function, however well it is measured."""
Round = tuple[float, float, float]
"""Seconds of a call of the default, of the tactic, and of the default again, one right after the other."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tactic against the default: the seconds of one call each, the share of time that the tactic saves, and what
    share the same measurement shows between equal functions."""

    default_seconds: float
    seconds: float
    gain: float
    noise: float

    @property
    def wins(self) -> bool:
        return self.gain > max(self.noise, LEAST_GAIN)


def paired(
    default: Callable[[], Any], tactic: Callable[[], Any], synchronize: Callable[[], None], seconds: float
) -> list[Round]:
    """`ROUNDS` rounds within about `seconds`; every sample of a round is of equally many calls."""
    functions = (default, tactic, default)
    for function in functions:
        function()
    once = max(sum(_seconds(function, synchronize, 1) for function in functions), 1e-7)
    calls = max(1, int(seconds / ROUNDS / once))
    out = []
    for _ in range(ROUNDS):
        before, mine, after = (_seconds(function, synchronize, calls) for function in functions)
        out.append((before, mine, after))
    return out


def _seconds(function: Callable[[], Any], synchronize: Callable[[], None], calls: int) -> float:
    synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter() - begun) / calls


def compare_rounds(rounds: Sequence[Round]) -> Comparison:
    """The comparison that at least two rounds amount to.

    The gain is the median over rounds, so that a slow moment of the machine counts in one round at most. The noise is
    the larger of what three quarters of the rounds stay under between the default's own two times, and half the
    middle spread of the tactic's; both in ratios of times, and put as the share that such a ratio would save.
    """
    ratios = [math.log(mine / math.sqrt(before * after)) for before, mine, after in rounds]
    control = [abs(math.log(after / before)) for before, _, after in rounds]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    spread = max(quantiles(control, n=4, method="inclusive")[2], (high - low) / 2)
    whole = median((before + after) / 2 for before, _, after in rounds)
    return Comparison(whole, median(mine for _, mine, _ in rounds), -math.expm1(middle), -math.expm1(-spread))
