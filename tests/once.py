"""What several test modules read and none changes, made by whichever of pytest's processes comes first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The path that `make` was called with, in this session by one process. Where it fails, the next one tries."""
    base = factory.getbasetemp()
    # Each worker of pytest-xdist has a folder of its own in the session's.
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = base / f"once-{name}"
    with (base / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            half = base / f"once-{name}.half{os.getpid()}"
            make(half)
            half.rename(made)
    return made
