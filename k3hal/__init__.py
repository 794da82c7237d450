"""K3HAL: Kimi K3 from one hardware-agnostic model text."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "K3HALError", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from k3hal.engine.outputs import CompletionOutput, RequestOutput
    from k3hal.errors import K3HALError
    from k3hal.llm import LLM
    from k3hal.sampling_params import SamplingParams

_HOMES = {
    "LLM": "k3hal.llm",
    "CompletionOutput": "k3hal.engine.outputs",
    "K3HALError": "k3hal.errors",
    "RequestOutput": "k3hal.engine.outputs",
    "SamplingParams": "k3hal.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import k3hal` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'k3hal' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
