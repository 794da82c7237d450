"""Says, once, what runs slower than it could: the visible half of the `warn` fallback policy."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from k3hal.dispatch.select import REFERENCE, Decision

logger = logging.getLogger("k3hal.dispatch")
_said: set[tuple[str, str]] = set()


def warn_of_fallbacks(decisions: Iterable[Decision]) -> None:
    """Log the operators that run their reference (a warning) or are composed (info); each once per device."""
    decisions = list(decisions)
    slow = sorted({(d.call.device.id, op) for d in decisions for op in _references(d)} - _said)
    built = sorted({(d.call.device.id, f"{d.call.op} of {', '.join(d.parts)}") for d in decisions if d.parts} - _said)
    _said.update(slow, built)
    if slow:
        logger.warning(
            "on %s these operators run their reference, which is not written for speed: %s",
            slow[0][0],
            ", ".join(op for _, op in slow),
        )
    if built:
        logger.info("no coarse provider on %s; composed: %s", built[0][0], "; ".join(what for _, what in built))


def _references(decision: Decision) -> Iterable[str]:
    if decision.provider == REFERENCE:
        yield decision.call.op
    for part in decision.parts.values():
        yield from _references(part)
