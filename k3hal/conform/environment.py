"""What a result depends on besides the code: machine, versions, environment variables, and the state of the sources."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3hal import __version__
from k3hal.conform.source_state import SourceState, source_root, source_state
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.emulated import EMULATED
from k3hal.dispatch.registry import Registry
from k3hal.env import PREFIX

KNOWN_PREFIXES = (
    PREFIX, "CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "TRITON_", "FLASHINFER_", "ROCR_", "HIP_", "HSA_", "AMD_",
    "MIOPEN_", "AITER_", "RCCL_", "ASCEND_", "HCCL_", "TORCH_", "PYTORCH_", "OMP_", "GOMP_", "KMP_", "MKL_", "CXX",
)  # fmt: skip
"""Variables that change what an operator computes or which code runs. A path's value is not recorded, only that it
is set."""
_DRIVERS = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "amd": Path("/sys/module/amdgpu/version"),
    "ascend": Path("/usr/local/Ascend/driver/version.info"),
}


@dataclass(frozen=True, slots=True)
class Statement:
    """Which code was judged. `commit` is empty outside a git checkout; the version names it then."""

    version: str
    commit: str
    dirty: bool
    created: str

    def to_json(self) -> dict[str, Any]:
        fields = {"version": self.version, "commit": self.commit, "dirty": self.dirty, "created": self.created}
        return {"product": "k3hal", **fields}


def statement() -> Statement:
    """Of the code as it is now: a change of any source file that is not committed makes it dirty."""
    root = source_root()
    created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = SourceState("", False) if root is None else source_state(root)
    return Statement(__version__, state.commit, state.dirty, created)


def is_emulated(report: Mapping[str, Any]) -> bool:
    """Whether a report's machine was one whose libraries are emulated, on a CPU."""
    return EMULATED in report["device"].get("features", ())


def device_json(device: DeviceDescription) -> dict[str, Any]:
    return {
        "device": device.id,
        "title": device.title,
        "vendor": device.vendor,
        "arch": device.arch,
        "memory_bytes": device.memory_bytes,
        "features": sorted(device.features),
        "driver": _first_line(_DRIVERS.get(device.vendor)),
        "system": f"{platform.system()} {platform.release()}",
    }


def _first_line(path: Path | None) -> str:
    if path is None or not path.exists():
        return ""
    return path.read_text("utf-8", errors="replace").strip().splitlines()[0]


def versions(device: DeviceDescription, registry: Registry, backends: Iterable[str]) -> dict[str, str]:
    """Python, torch, the CPU that draws the samples, the compiler, and every package that a provider of the judged
    backends asks for."""
    names = {"torch", "triton", "cuda", "rocm", "cann", "numpy"}
    wanted = set(backends)
    names |= {name for p in registry.providers if p.backend in wanted for name in p.needs.packages}
    found = {name: device.packages[name] for name in sorted(names) if name in device.packages}
    return {"k3hal": __version__, "python": platform.python_version(), **found, "torch": torch.__version__,
            "cpu": cpu_kind(), "compiler": _compiler()}  # fmt: skip


def cpu_kind() -> str:
    """The host CPU's architecture and the vector instructions that torch uses there, on which drawn values depend."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _compiler() -> str:
    """The first line of the C++ compiler's own version, the one `CXX` names or g++; empty where there is none."""
    tool = shutil.which(os.environ.get("CXX") or "g++")
    if tool is None:
        return ""
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return next(iter(done.stdout.splitlines()), "")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The known variables that are set; a value with a path in it is left out."""
    known = {name: value for name, value in environ.items() if name.startswith(KNOWN_PREFIXES)}
    return {name: "(a path)" if "/" in value else value for name, value in sorted(known.items())}
