"""`emulated:mi300x`, for processes that `ci/emulated.py` starts."""

from __future__ import annotations

from importlib import import_module

import pytest

from k3hal.dispatch import Backend
from k3hal.dispatch.emulated import emulate
from k3hal.dispatch.stand_in import StandIn

BACKEND = Backend(name="emulated_mi300x", vendors=("amd",), auto=False)

import_module("aiter_ops").install([], pytest.MonkeyPatch())
emulate("mi300x", StandIn("gfx942", 304, 64 << 10))
