"""`emulated:ascend_950`, for processes that `ci/emulated.py` starts."""

from __future__ import annotations

from importlib import import_module

import pytest

from k3hal.dispatch import Backend
from k3hal.dispatch.emulated import emulate

BACKEND = Backend(name="emulated_ascend_950", vendors=("ascend",), auto=False)

LIBRARIES = import_module("torch_ops").install(import_module("ascend_ops").EMULATORS, [], pytest.MonkeyPatch())
emulate("ascend_950")
