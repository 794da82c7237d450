"""Compiles a kernel file for this processor once, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.cache_dir import cache_dir, using_cache
from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.errors import InputError, UnsupportedError
from k3hal.dispatch.host import cpu_features, cpu_name

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

_SOURCES = Path(__file__).parent
# PyTorch's own OpenMP runtime is loaded already and serves these symbols: linking another would make two pools of
# threads fight over the same cores. Hence compiled with -fopenmp and linked without.
_COMPILE = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fPIC", "-Wno-psabi", "-c")


def compiler() -> str | None:
    """The C++ compiler that would be used: `$CXX`, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def supported(call: Call) -> Answer:
    """Whether the kernels run on the call's machine, and compile here. They are written for 64-byte vectors."""
    reasons = []
    if "avx512f" not in call.device.features:
        reasons.append("needs AVX-512")
    if compiler() is None:
        reasons.append("needs a C++ compiler (g++, or the one CXX names)")
    if problem := _no_place(cache_dir() / "native"):
        reasons.append(problem)
    return No(*reasons) if reasons else Yes("compiled for this processor on first use")


@cache
def _no_place(folder: Path) -> str:
    """Why kernels can be kept nowhere, empty if they can; tried, since permissions alone do not tell. Where nothing can
    be written, kernels compiled before still serve."""
    try:
        with using_cache(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return ""
    except InputError as error:
        return "" if any(folder.glob("*.so")) else str(error)


@cache
def library(name: str) -> ctypes.CDLL:
    """`<name>.cpp` as a loaded library. Kept in the cache folder by source, compiler and processor.

    Raises `UnsupportedError` with the compiler's first complaint when it does not compile or load, `InputError`
    when the cache folder cannot be used.
    """
    tool = compiler()
    if tool is None:
        raise UnsupportedError(
            "no C++ compiler for the CPU kernels", hint="install g++, or choose other providers with --ops"
        )
    target = cache_dir() / "native" / f"{name}-{_fingerprint(name, tool)}.so"
    with using_cache(target.parent):
        if not target.exists():
            _compile(tool, _SOURCES / f"{name}.cpp", target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise UnsupportedError(
            f"the compiled CPU kernel {target} cannot be loaded: {error}", hint="delete it"
        ) from error


def _fingerprint(name: str, tool: str) -> str:
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (version, *_COMPILE, cpu_name(), *sorted(cpu_features())):
        digest.update(part.encode() + b"\0")
    for source in (*sorted(_SOURCES.glob("*.h")), _SOURCES / f"{name}.cpp"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(tool: str, source: Path, target: Path) -> None:
    """Processes may race: each compiles aside, and the last to finish replaces an equal file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unlinked, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        for command in (
            [tool, *_COMPILE, str(source), "-o", str(unlinked)],
            [tool, "-shared", str(unlinked), "-o", str(linked)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                complaint = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
                raise UnsupportedError(
                    f"{tool} cannot compile the CPU kernel {source.name}: {complaint}",
                    hint="choose other providers with --ops",
                )
        os.replace(linked, target)


def function(name: str, symbol: str, *argument_types: Any) -> Any:
    """A C function without result, from `<name>.cpp`."""
    found = getattr(library(name), symbol)
    found.argtypes, found.restype = argument_types, None
    return found


def dense_rows(x: Tensor) -> Tensor:
    """`x` [T, D] in fp32 with unit stride along D; itself where it is so already."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def threads() -> int:
    return torch.get_num_threads()
