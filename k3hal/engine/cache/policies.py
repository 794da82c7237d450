"""Retention policies by name."""

from __future__ import annotations

from k3hal.engine.cache.cost import CostAware
from k3hal.engine.cache.policy import Interval, Nothing, PromptEnd, RetentionPolicy, SecondHit
from k3hal.errors import UsageError

_PLAIN = {"none": Nothing, "prompt": PromptEnd, "second-hit": SecondHit, "cost": CostAware}
MOST_INTERVAL = 2**31 - 1
"""Tokens; far more than any sequence has, and positions stay within 64 bits."""


def make_policy(text: str) -> RetentionPolicy:
    """A new policy from `none`, `prompt`, `second-hit`, `interval:N` (tokens) or `cost`. Raises `UsageError`."""
    name, _, argument = text.partition(":")
    if name == "interval":
        if not (argument.isascii() and argument.isdecimal()) or not argument.strip("0"):
            raise UsageError(
                f"prefix cache policy {text!r} has no interval",
                hint="give its tokens: interval:4096, or --prefix-cache-retention-interval 4096",
            )
        if len(argument) > 18 or int(argument) > MOST_INTERVAL:
            raise UsageError(
                f"prefix cache policy 'interval' has an interval of {argument:.40}", hint=f"at most {MOST_INTERVAL}"
            )
        return Interval(int(argument))
    if text not in _PLAIN:
        raise UsageError(
            f"unknown prefix cache policy {text!r}", hint="it is none, prompt, second-hit, interval:N or cost"
        )
    return _PLAIN[text]()
