"""AITER, AMD's library of kernels: what its adapters need, and the switches that its users set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from k3hal.dispatch.call import Call, No, Yes
from k3hal.dispatch.library import Function, usable

PACKAGE = "amd-aiter"
LIBRARY = "amd-aiter"
CDNA = ("gfx942", "gfx950")
PRIORITY = 30
"""Below the portable kernels: a library is taken where they say No, or by name."""
MASTER = "VLLM_ROCM_USE_AITER"
"""vLLM's switch for all of AITER; it has one for each of its uses too, by this name with an ending."""

# Values that forbid the library, by variable. What is not set says nothing.
Forbidden = Mapping[str, tuple[str, ...]]
OFF = ("0", "false", "no", "off")


def switch(ending: str = "") -> Forbidden:
    """vLLM's switches of one use of AITER, which users of ROCm set already: 0 keeps an adapter from it too."""
    return dict.fromkeys(dict.fromkeys((MASTER, MASTER + ending)), OFF)


def usable_as_switched(
    call: Call, functions: tuple[Function, ...], switches: Forbidden, *reasons: str | None
) -> Yes | No:
    """As `usable`; a variable of this process's environment that has a forbidding value is a reason, one that has
    another is named with the Yes."""
    said = {name: os.environ[name] for name in switches if os.environ.get(name, "").strip()}
    forbids = [f"{name} is {v} in the environment" for name, v in said.items() if v.strip().lower() in switches[name]]
    answer = usable(call, functions, *forbids, *reasons)
    if isinstance(answer, No) or not said:
        return answer
    return Yes(", ".join(f"{name}={value}" for name, value in said.items()))
