"""What this machine has: the accelerators torch can reach, and the host CPU.

Probing an accelerator initialises its driver in this process: probe in the process that will run on it.
"""

from __future__ import annotations

import os

from k3hal.dispatch import probe_vendors
from k3hal.dispatch.describe import describe, described_ids
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.emulated import PREFIX, emulated_machine
from k3hal.dispatch.errors import UnsupportedError, UsageError
from k3hal.dispatch.host import cpu_arch, cpu_features, cpu_name, host_memory
from k3hal.dispatch.packages import INSTALLED
from k3hal.dispatch.words import nearest

ACCELERATORS = ("cuda", "rocm", "npu")
PRESENT_KINDS = ("auto", "cpu", *ACCELERATORS)


def probe(device: str = "auto") -> DeviceDescription:
    """The device of this machine that `device` names: `cpu`, `cuda`, `cuda:1`, `rocm`, `npu`, or `auto`.

    `auto` is the first accelerator, or the CPU where there is none; `emulated:NAME` one that is emulated
    (`dispatch/emulated.py`). Raises `UsageError` for any other word,
    `UnsupportedError` for a device this machine lacks, `ProbeError` when a driver that is there does not answer.
    """
    if device.startswith(PREFIX):
        return emulated_machine(device)
    kind, index = _parse(device)
    if kind == "cpu":
        return _cpu()
    if kind == "auto":
        return present_devices()[0]
    found = probe_vendors.devices(kind)
    if index < len(found):
        return found[index]
    have = ", ".join(d.id for d in found) or f"no {kind} device ({probe_vendors.why_none(kind)})"
    raise UnsupportedError(f"there is no {kind}:{index} on this machine", hint=f"it has {have}")


def present_devices() -> tuple[DeviceDescription, ...]:
    """Every device of this machine, accelerators first, the CPU last. Raises `ProbeError` as `probe` does."""
    return (*(d for kind in ACCELERATORS for d in probe_vendors.devices(kind)), _cpu())


def resolve_device(text: str) -> DeviceDescription:
    """A present device (`cpu`, `cuda:1`, `auto`) or a described one (`mi355x`), for verbs that take both."""
    kind = text.strip().lower().partition(":")[0]
    if kind in PRESENT_KINDS:
        return probe(text)
    if kind.replace("-", "_") in described_ids():
        return describe(text)
    known = {*PRESENT_KINDS, *described_ids()}
    raise UsageError(f"unknown device {text!r}", hint=nearest(kind, known, always_list=True))


def _parse(device: str) -> tuple[str, int]:
    kind, colon, index = device.strip().lower().partition(":")
    if kind.replace("-", "_") in described_ids() and kind != "cpu":
        raise UsageError(
            f"{device!r} describes a machine that is not here",
            hint=f"it can be planned for, not run on; here: {', '.join(PRESENT_KINDS)}",
        )
    if kind not in PRESENT_KINDS:
        raise UsageError(f"unknown device {device!r}", hint=nearest(kind, PRESENT_KINDS, always_list=True))
    if colon and (kind not in ACCELERATORS or not index.isdecimal()):
        raise UsageError(f"device {device!r} is not understood", hint="like cpu, cuda, cuda:1, rocm:0 or npu:3")
    return kind, int(index or 0)


def _interpreter() -> frozenset[str]:
    """Triton runs its kernels on a CPU, in Python, where the process was started with TRITON_INTERPRET=1."""
    return frozenset({"triton_interpreter"} if os.environ.get("TRITON_INTERPRET") == "1" else ())


def _cpu() -> DeviceDescription:
    return DeviceDescription(
        id="cpu",
        vendor="cpu",
        arch=cpu_arch(),
        torch_device="cpu",
        present=True,
        memory_bytes=host_memory()[0],
        features=cpu_features() | _interpreter(),
        packages=INSTALLED,
        source="probed",
        title=cpu_name(),
    )
