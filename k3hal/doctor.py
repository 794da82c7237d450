"""Facts about this machine that decide what K3HAL can do on it. Sizes are in bytes."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from k3hal import __version__
from k3hal.checkpoints import DEFAULT_PRESET
from k3hal.dispatch.cache_dir import cache_dir, using_cache
from k3hal.dispatch.host import cpu_arch, cpu_features, cpu_name, host_memory
from k3hal.errors import CapacityError, InputError, K3HALError, UnsupportedError

if TYPE_CHECKING:
    from k3hal.dispatch.device import DeviceDescription

SCHEMA = "k3hal.doctor/1"

_REQUIRED = ("torch", "safetensors", "numpy", "tiktoken", "pydantic", "typer", "rich", "fastapi", "uvicorn")
_REQUIRED += ("orjson", "prometheus-client", "pyyaml", "psutil")
_OPTIONAL = ("triton", "torch-npu", "transformers", "vllm")


def examine(model: str | None = None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report for `--json`; of a `model`, also how an engine with `options` would divide the memory.

    What is broken is reported, not raised: each line of `problems` is something without which K3HAL does not run.
    Raises `UsageError`, `ConfigError` or `CheckpointError` for a model or options that are none.
    """
    problems = [f"package {name} is not installed" for name in _REQUIRED if _version(name) is None]
    torch = _torch(problems)
    devices = _devices(problems) if torch else ()
    return {
        "k3hal": __version__,
        "machine": _machine(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)},
        "torch": torch,
        "devices": [_facts(device) for device in devices],
        "would_run": _would_run(devices[0], problems) if devices else None,
        "memory": _memory(model, options or {}, problems) if torch and model is not None else None,
        "cache": _cache(problems),
        "problems": problems,
    }


def _machine() -> dict[str, Any]:
    total, available = host_memory()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": cpu_arch(),
        "cpu": cpu_name(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": sorted(cpu_features()),
        "memory_total": total,
        "memory_available": available,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch(problems: list[str]) -> dict[str, Any] | None:
    try:
        import torch
    except (ImportError, OSError) as error:
        problems.append(f"import torch failed: {error}")
        return None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _devices(problems: list[str]) -> tuple[DeviceDescription, ...]:
    """Accelerators first, the CPU last: the first is what `--device auto` means."""
    from k3hal.dispatch.probe import present_devices

    try:
        return present_devices()
    except K3HALError as error:
        problems.append(str(error))
        return ()


def _facts(device: DeviceDescription) -> dict[str, Any]:
    return {
        "device": device.id,
        "name": device.title,
        "arch": device.arch,
        "memory_total": device.memory_bytes,
        "features": sorted(device.features),
    }


def _would_run(device: DeviceDescription, problems: list[str]) -> dict[str, Any] | None:
    """Which provider each operator of the default model would get on `device`, K3HAL_OPS included."""
    from k3hal.dispatch.assemble import build_selector
    from k3hal.dispatch.call import Call
    from k3hal.model.config import ModelConfig
    from k3hal.model.presets import preset_config
    from k3hal.model.requests import model_requests

    dtype = "float32" if device.vendor == "cpu" else "bfloat16"
    providers: dict[str, str] = {}
    try:
        selector = build_selector(fallback="warn")
        for request in model_requests(ModelConfig.from_json(preset_config(DEFAULT_PRESET)), dtype, dtype):
            call = Call(request.op, device, dtype, request.phase, request.dims)
            providers[request.op] = selector.decide(call).provider
    except K3HALError as error:
        problems.append(str(error))
        return None
    return {"model": DEFAULT_PRESET, "device": device.id, "dtype": dtype, "operators": providers}


def _memory(model: str, options: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """A `MemoryPlan.report`, in which `known` is `computed`, or `allowance` for what only a run finds out."""
    from k3hal.checkpoints import resolve_model
    from k3hal.engine.build import estimate_memory
    from k3hal.engine.options import EngineOptions

    source = resolve_model(model)
    try:
        device, plan = estimate_memory(source, EngineOptions.of(**options))
    except (CapacityError, UnsupportedError) as error:
        problems.append(str(error))
        return None
    return {"model": source.name, "device": device.id, **plan.report()}


def _cache(problems: list[str]) -> dict[str, Any]:
    path = cache_dir()
    try:
        with using_cache(path):
            existing = next(parent for parent in (path, *path.parents) if parent.exists())
            return {"path": str(path), "exists": path.exists(), "disk_free": shutil.disk_usage(existing).free}
    except InputError as error:
        problems.append(str(error))
        return {"path": str(path), "exists": False, "disk_free": 0}
