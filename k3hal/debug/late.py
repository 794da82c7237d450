"""Threads that a call leaves running, which may write what it gave after it has returned."""

from __future__ import annotations

import os
import time

LATE = 0.1
"""Seconds that threads of a call get to end, or to show what they write. A pool's stay, and cost this once."""
_STEP = 0.002


def thread_ids() -> frozenset[str]:
    """Every thread of this process, those of compiled libraries included."""
    return frozenset(os.listdir("/proc/self/task"))


def waited_for_new(before: frozenset[str]) -> bool:
    """Whether threads run that were not there `before`; returns when they have ended, or after `LATE` seconds."""
    if not thread_ids() - before:
        return False
    until = time.monotonic() + LATE
    while thread_ids() - before and time.monotonic() < until:
        time.sleep(_STEP)
    return True
