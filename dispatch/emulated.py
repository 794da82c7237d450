"""Machines whose vendor's libraries are emulated in this process: tensors are the CPU's, and Triton is interpreted.

What passes on one says what its providers compute, and nothing of the machine: evidence goes up to E2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from k3hal.dispatch.describe import describe
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.packages import INSTALLED
from k3hal.dispatch.stand_in import StandIn, stand_for

PREFIX = "emulated:"
EMULATED = "emulated"
"""The feature that such a machine has."""
_machines: dict[str, DeviceDescription] = {}


def emulate(name: str, gpu: StandIn | None = None) -> DeviceDescription:
    """Let `emulated:NAME` be the described machine of that name, for the rest of this process.

    Who calls this has put emulators in the place of the libraries that the description names. torch and Triton are
    those that are installed. `gpu` is what Triton kernels are told of it.
    """
    if gpu is not None:
        stand_for(gpu)
    machine = describe(name)
    real = {package: INSTALLED[package] for package in ("torch", "triton") if package in INSTALLED}
    kept: Mapping[str, str] = {n: v for n, v in machine.packages.items() if n not in ("torch", "triton")}
    interpreted = {"triton_interpreter"} if os.environ.get("TRITON_INTERPRET") == "1" else set()
    made = replace(
        machine,
        id=PREFIX + machine.id,
        present=True,
        torch_device="cpu",
        packages={**kept, **real},
        features=machine.features - {"graphs"} | {EMULATED} | interpreted,
        source=f"{machine.source}; emulated on a CPU",
    )
    _machines[made.id] = made
    return made


def emulated_machine(device: str) -> DeviceDescription:
    """The machine of `emulated:NAME`. Raises `UnsupportedError` where this process has no emulators of it."""
    if device not in _machines:
        have = ", ".join(_machines) or "none"
        raise UnsupportedError(
            f"there are no emulators of {device.removeprefix(PREFIX)!r} in this process",
            hint=f"there are of {have}; python ci/emulated.py starts a run with them",
        )
    return _machines[device]
