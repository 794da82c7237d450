"""Where a measurement was made: machine, versions, commit."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from k3hal import __version__
from k3hal.conform.environment import statement
from k3hal.dispatch.host import cpu_name, host_memory

_PEER_PACKAGES = ("transformers",)


def circumstances() -> dict[str, Any]:
    """Facts a number means nothing without, as of now. `load` is the machine's load average over one minute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "cores": cores,
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "memory": host_memory()[0],
            "load": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "k3hal": __version__,
            "commit": commit(),
            "torch": torch.__version__,
            **{name: _version(name) for name in _PEER_PACKAGES},
        },
    }


def commit() -> str | None:
    """The sources' commit, `-dirty` where they were changed since; None for an installed package or without git."""
    made = statement()
    return made.commit[:12] + ("-dirty" if made.dirty else "") if made.commit else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
