"""Facts about this machine that decide what K3HAL can do on it. Sizes are in bytes."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from k3hal import __version__
from k3hal.checkpoints import cache_dir

SCHEMA = "k3hal.doctor/1"

# Instruction sets that change which CPU code runs or how fast; names as the kernel reports them.
_ISA_OF_INTEREST = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16")
_ISA_OF_INTEREST += ("amx_tile", "amx_int8", "amx_bf16", "amx_fp16")
_ISA_OF_INTEREST += ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme")

_REQUIRED = ("torch", "safetensors", "numpy", "tiktoken", "pydantic", "typer", "rich", "fastapi", "uvicorn")
_REQUIRED += ("orjson", "prometheus-client", "pyyaml", "psutil")
_OPTIONAL = ("triton", "torch-npu", "transformers", "vllm")


def examine() -> dict[str, Any]:
    """The report for `--json`. What cannot be found is None; a torch that fails to import is reported, not raised."""
    return {
        "k3hal": __version__,
        "machine": _machine(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)},
        "missing": [name for name in _REQUIRED if _version(name) is None],
        "torch": _torch(),
        "devices": _devices(),
        "cache": _cache(),
    }


def _machine() -> dict[str, Any]:
    model, flags = _cpu_info(Path("/proc/cpuinfo"))
    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": model or platform.processor() or None,
        "cores": psutil.cpu_count(logical=False),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "isa": [flag for flag in _ISA_OF_INTEREST if flag in flags],
        "memory_total": memory.total,
        "memory_available": memory.available,
    }


def _cpu_info(path: Path) -> tuple[str | None, set[str]]:
    """Model name and flags of the first processor; (None, empty) on a system without the file."""
    if not path.exists():
        return None, set()
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name"), set((fields.get("flags") or fields.get("Features") or "").split())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"error": f"import torch failed: {error}"}
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _devices() -> list[dict[str, Any]]:
    """The CPU, then each accelerator torch sees, by the names `--device` takes."""
    found: list[dict[str, Any]] = [{"device": "cpu", "name": platform.machine(), "memory_total": None}]
    try:
        import torch
    except (ImportError, OSError):
        return found  # `torch` in the report says why
    if not torch.accelerator.is_available():
        return found
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    name = "rocm" if torch.version.hip else kind.type
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        found.append(
            {
                "device": f"{name}:{index}",
                "name": getattr(properties, "name", None),
                "memory_total": getattr(properties, "total_memory", None),
            }
        )
    return found


def _cache() -> dict[str, Any]:
    path = cache_dir()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return {"path": str(path), "exists": path.exists(), "disk_free": shutil.disk_usage(existing).free}
