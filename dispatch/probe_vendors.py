"""Accelerators as torch reports them. Only an absent driver or a torch built without it means "none"."""

from __future__ import annotations

import importlib.util
import os
import re
from collections import ChainMap
from collections.abc import Callable
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import Any

from k3hal.dispatch.describe import described_as, features_of_arch
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import ProbeError
from k3hal.dispatch.packages import INSTALLED

# First and last SoC version number of each Ascend generation, as torch_npu reports it.
_ASCEND_SOCS = {
    "ascend310p": (200, 205),
    "ascend910b": (220, 225),
    "ascend910c": (250, 255),
    "ascend950": (260, 260),
}
_VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
_DRIVER_NODES = {"cuda": "/dev/nvidia[0-9]*", "rocm": "/dev/kfd", "npu": "/dev/davinci[0-9]*"}
# Under WSL every vendor's GPU stands behind this one; it says nothing about whose it is.
_SHARED_NODE = "/dev/dxg"
_ADVICE = "check the driver and who may open its device file, or use --device cpu"


def devices(kind: str) -> tuple[DeviceDescription, ...]:
    """All devices of `cuda`, `rocm` or `npu`, in torch's order; empty when there are none."""
    if _absence(kind):
        return ()
    try:
        count, describe_one = _PROBES[kind]()
        found = tuple(describe_one(index) for index in range(count))
    except Exception as error:
        raise ProbeError(f"probing {kind} devices failed: {error!r}", hint=_ADVICE) from error
    if not found and glob(_DRIVER_NODES[kind]) and not _hidden(kind):
        raise ProbeError(
            f"{_DRIVER_NODES[kind]} exists but torch sees no {kind} device",
            hint=_ADVICE,
        )
    return found


def why_none(kind: str) -> str:
    """Why `devices(kind)` is empty, in words."""
    return _absence(kind) or f"torch sees none; hidden by {' or '.join(_VISIBLE[kind])}"


def _absence(kind: str) -> str:
    """The reason why this process cannot have such a device; empty if it may have one."""
    if not glob(_DRIVER_NODES[kind]) and not (kind != "npu" and glob(_SHARED_NODE)):
        return f"no driver: {_DRIVER_NODES[kind]} does not exist"
    if kind == "npu":
        return "" if importlib.util.find_spec("torch_npu") else "torch_npu is not installed"
    built_for = {"cuda": "cuda", "rocm": "hip"}[kind]
    torch = _torch()
    return "" if getattr(torch.version, built_for, None) else f"torch {torch.__version__} is built without {kind}"


def _hidden(kind: str) -> bool:
    return any(os.environ.get(name, "unset").strip() in ("", "-1") for name in _VISIBLE[kind])


def _torch() -> ModuleType:
    import torch

    return torch


Probe = tuple[int, Callable[[int], DeviceDescription]]


def _nvidia() -> Probe:
    torch = _torch()

    def one(index: int) -> DeviceDescription:
        facts = torch.cuda.get_device_properties(index)
        number = facts.major * 10 + facts.minor
        features = {"graphs"} | ({"fp8"} if number >= 89 else set())
        return _describe("cuda", index, "nvidia", f"sm_{number}", number, facts, features, {"cuda": torch.version.cuda})

    return torch.cuda.device_count(), one


def _amd() -> Probe:
    torch = _torch()

    def one(index: int) -> DeviceDescription:
        facts = torch.cuda.get_device_properties(index)
        arch = facts.gcnArchName.split(":")[0]
        # torch.version.hip is like 7.2.26015-fc0d8cf: what follows the hyphen is a commit.
        toolkit = {"rocm": torch.version.hip.split("-")[0]}
        return _describe("rocm", index, "amd", arch, gfx_number(arch), facts, {"graphs"}, toolkit)

    return torch.cuda.device_count(), one


def _ascend() -> Probe:
    torch = _torch()
    torch_npu = importlib.import_module("torch_npu")
    soc = int(torch_npu.npu.get_soc_version())
    arch, number = ascend_arch(soc)

    def one(index: int) -> DeviceDescription:
        facts = torch.npu.get_device_properties(index)
        return _describe("npu", index, "ascend", arch, number, facts, {"graphs"}, _cann())

    return torch.npu.device_count(), one


_PROBES: dict[str, Callable[[], Probe]] = {"cuda": _nvidia, "rocm": _amd, "npu": _ascend}


def gfx_number(arch: str) -> int:
    """An AMD architecture's ordered number: major, minor and stepping digits, a lettered stepping counting as 9."""
    digits = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", arch)
    if not digits:
        raise ValueError(f"{arch!r} is not an AMD architecture name")
    major, minor, stepping = int(digits[1]), int(digits[2], 16), int(digits[3], 16)
    return major * 100 + min(minor, 9) * 10 + min(stepping, 9)


def ascend_arch(soc: int) -> tuple[str, int]:
    """Name and ordered number of an Ascend generation from a SoC version number."""
    for name, (first, last) in _ASCEND_SOCS.items():
        if first <= soc <= last:
            return name, first
    return f"ascend_soc{soc}", soc


def _cann() -> dict[str, str]:
    """The CANN toolkit's version, read from the file its installer leaves under ASCEND_HOME_PATH."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    for file in sorted(Path(home).glob("*/ascend_toolkit_install.info")) if home else ():
        lines = dict(line.split("=", 1) for line in file.read_text("utf-8").splitlines() if "=" in line)
        if "version" in lines:
            return {"cann": lines["version"].strip()}
    return {}


def _describe(
    kind: str,
    index: int,
    vendor: str,
    arch: str,
    number: int,
    facts: Any,
    features: set[str],
    toolkit: dict[str, str],
) -> DeviceDescription:
    """Probed facts; the rates are those of the description whose chip the driver names."""
    known = described_as(facts.name)
    if known and known.arch != arch:
        known = None
    return DeviceDescription(
        id=f"{kind}:{index}",
        vendor=vendor,
        arch=arch,
        arch_number=number,
        torch_device=f"{'npu' if kind == 'npu' else 'cuda'}:{index}",
        present=True,
        memory_bytes=int(facts.total_memory),
        bandwidth=known.bandwidth if known else 0.0,
        flops=known.flops if known else {},
        features=frozenset(features) | (known.features if known else features_of_arch(vendor, arch)),
        packages=ChainMap(toolkit, INSTALLED),  # type: ignore[arg-type]
        source=f"probed; rates from {known.source}" if known else "probed",
        title=facts.name,
        notes=known.notes if known else (),
    )
