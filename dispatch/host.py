"""The host CPU: instruction sets and memory figures. Loads no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_X86 = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16",
)  # fmt: skip
_ARM = {"asimd": "neon", "sve": "sve", "sve2": "sve2", "bf16": "bf16", "i8mm": "i8mm"}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# File of the limit, file of the use, and the use's part that the kernel gives back, in either version's words.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def cpu_arch() -> str:
    """`x86_64`, `aarch64` or whatever else the machine calls itself, in lower case."""
    machine = platform.machine().lower()
    return _MACHINES.get(machine, machine)


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    return _cpuinfo().get("model name") or cpu_arch()


def cpu_features() -> frozenset[str]:
    """Instruction sets providers may ask for, by their Linux names; empty where the system does not list them."""
    facts = _cpuinfo()
    found = {flag for flag in facts.get("flags", "").split() if flag in _X86}
    return frozenset(found | {_ARM[flag] for flag in facts.get("features", "").split() if flag in _ARM})


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo, keys in lower case; empty on other systems."""
    if not _CPUINFO.exists():
        return {}
    first = _CPUINFO.read_text("utf-8").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def host_memory() -> tuple[int, int]:
    """Total and free bytes this process may use: the machine's, or its control group's where that allows less."""
    import psutil

    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _cgroup_limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of every control group above this process that has a memory limit."""
    if not _CGROUP.exists():
        return []
    out = []
    for line in _CGROUP.read_text("utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, names = _CGROUP_ROOT, _V2
        elif "memory" in controllers.split(","):
            base, names = _CGROUP_ROOT / "memory", _V1
        else:
            continue
        folder = base / path.lstrip("/")
        out += [found for at in (folder, *folder.parents) if at.is_relative_to(base) and (found := _limit(at, *names))]
    return out


def _limit(folder: Path, limit_name: str, used_name: str, reclaimable: str) -> tuple[int, int] | None:
    """One group's limit and use without the file cache that the kernel gives back; None where there is no limit."""
    limit_file, used_file, stat_file = folder / limit_name, folder / used_name, folder / "memory.stat"
    if not all(os.access(file, os.R_OK) for file in (limit_file, used_file, stat_file)):
        return None
    limit = limit_file.read_text().strip()
    if limit == "max":
        return None
    stat = dict(line.split(" ", 1) for line in stat_file.read_text().splitlines())
    return int(limit), max(0, int(used_file.read_text()) - int(stat.get(reclaimable, 0)))
