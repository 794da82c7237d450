"""`triton.jit` typed as what it makes: an object that is indexed by a grid and called with a kernel's arguments and
launch options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import triton

jit = cast("Callable[[Callable[..., Any]], Any]", triton.jit)
