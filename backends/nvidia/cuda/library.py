"""Compiles a kernel file with nvcc once, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from k3hal.dispatch.cache_dir import cache_dir, using_cache
from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.errors import UnsupportedError

SOURCES = Path(__file__).parent
# The runtime is linked in, so that it does not matter which one torch brought; both share the device's primary context.
COMPILE = (
    "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-diag-suppress", "177", "-cudart", "static",
    "-Xcompiler", "-fPIC", "-shared",
)  # fmt: skip


def compiler() -> str | None:
    """nvcc: of `$CUDA_HOME`, else on the path, else where CUDA installs itself."""
    home = os.environ.get("CUDA_HOME")
    places = [str(Path(home) / "bin" / "nvcc")] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, places)), None)


def compiles(call: Call) -> Answer:
    """Whether kernels can be compiled here."""
    del call
    if compiler() is None:
        return No("needs nvcc (of CUDA_HOME, or on the path)")
    return Yes("compiled on first use")


@cache
def library(name: str) -> ctypes.CDLL:
    """`<name>.cu` as a loaded library. Kept in the cache folder by source and compiler.

    Raises `UnsupportedError` with the compiler's first complaint when it does not compile or load, `InputError`
    when the cache folder cannot be used.
    """
    tool = compiler()
    if tool is None:
        raise UnsupportedError(
            "no nvcc for the CUDA kernels", hint="install CUDA, or choose other providers with --ops"
        )
    target = cache_dir() / "cuda" / f"{name}-{_fingerprint(name, tool)}.so"
    with using_cache(target.parent):
        if not target.exists():
            _compile(tool, SOURCES / f"{name}.cu", target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise UnsupportedError(
            f"the compiled CUDA kernel {target} cannot be loaded: {error}", hint="delete it"
        ) from error


def _fingerprint(name: str, tool: str) -> str:
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (version, *COMPILE):
        digest.update(part.encode() + b"\0")
    for source in (*sorted(SOURCES.glob("*.h")), SOURCES / f"{name}.cu"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(tool: str, source: Path, target: Path) -> None:
    """Processes may race: each compiles aside, and the last to finish replaces an equal file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernel.so"
        command = [tool, *COMPILE, "-I", str(SOURCES), str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise UnsupportedError(
                f"{tool} cannot compile the CUDA kernel {source.name}: {complaint}",
                hint="choose other providers with --ops",
            )
        os.replace(made, target)
