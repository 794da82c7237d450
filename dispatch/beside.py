"""Work of a step that needs nothing of the work queued next, and so may run beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Work = Callable[[], Any]

Beside = Callable[[Work], Work]
"""Begins work beside what is queued next; what it returns gives the result to whoever calls it, in order. Called once,
before what the work reads is let go, and in the block of code that began it."""

BESIDE = "beside"
"""Under this name a lowering finds a `Beside` among its parts, where there is one."""

FEW_TOKENS = 256
"""Tokens up to which small products leave a device room for others."""
