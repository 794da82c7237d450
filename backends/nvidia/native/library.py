"""Compiles a kernel file for Hopper once, keeps it, and launches its kernels through the driver.

NVRTC is what compiles: torch brings it, so that no toolkit is needed, and takes half a second where nvcc takes many.
It has no headers; kernel files name their types themselves, and what they include of the headers beside them is put in
their place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from k3hal.dispatch.cache_dir import cache_dir, using_cache
from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.errors import UnsupportedError

ARCH = "sm_90a"
"""What these kernels are written for: Hopper, with the instructions that only it has."""
_SOURCES = Path(__file__).parent
_OPTIONS = (f"--gpu-architecture={ARCH}", "--std=c++17", "--device-as-default-execution-space")
_INCLUDE = re.compile(rb'^#include "(\w+\.h)"$', re.MULTILINE)
_MOST_SHARED, _AFTER_START = 8, 6  # Of the driver's header: an attribute of functions, one of launches.


def supported(call: Call) -> Answer:
    """Whether the kernels run on the call's device and compile here."""
    reasons = []
    if call.device.arch != "sm_90":
        reasons.append(f"needs sm_90, this is {call.device.arch}")
    if call.device.present and _compiler() is None:
        reasons.append("needs NVRTC of CUDA 12 or later, which torch's CUDA wheels bring")
    return No(*reasons) if reasons else Yes("compiled for Hopper on first use")


@cache
def _compiler() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "").partition(".")[0]
    for name in dict.fromkeys([f"libnvrtc.so.{major}", "libnvrtc.so.13", "libnvrtc.so.12"]):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compiled(name: str, macros: Sequence[str] = ()) -> bytes:
    """`<name>.cu` as machine code. Kept in the cache folder by source, compiler and macros (`NAME=value`).

    Raises `UnsupportedError` with the compiler's first complaint when it does not compile, `InputError` when the cache
    folder cannot be used.
    """
    compiler = _compiler()
    if compiler is None:
        raise UnsupportedError("no NVRTC for the CUDA kernels", hint="choose other providers with --ops")
    source = _source(f"{name}.cu")
    options = [*_OPTIONS, *(f"-D{macro}" for macro in macros)]
    version = (ctypes.c_int * 2)()
    compiler.nvrtcVersion(ctypes.byref(version), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    digest = hashlib.sha256(repr((list(version), options, source)).encode()).hexdigest()[:16]
    target = cache_dir() / "nvidia" / f"{name}-{digest}.cubin"
    with using_cache(target.parent):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            code = _compile(compiler, name, source, options)
            # Processes may race: each writes aside, and the last to finish replaces an equal file.
            with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
                file.write(code)
            os.replace(file.name, target)
        return target.read_bytes()


def _source(name: str) -> bytes:
    """A kernel file with what it includes in place."""
    text = (_SOURCES / name).read_bytes()
    return _INCLUDE.sub(lambda found: (_SOURCES / found[1].decode()).read_bytes(), text)


def _compile(compiler: ctypes.CDLL, name: str, source: bytes, options: Sequence[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _checked(compiler.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), 0, None, None), name)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(program, len(options), given):
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            lines = log.value.decode(errors="replace").splitlines()
            complaint = next((line for line in lines if "error" in line), "no reason given")
            raise UnsupportedError(
                f"NVRTC cannot compile the CUDA kernel {name}.cu: {complaint}", hint="choose other providers with --ops"
            )
        _checked(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)), name)
        code = ctypes.create_string_buffer(size.value)
        _checked(compiler.nvrtcGetCUBIN(program, code), name)
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _checked(status: int, what: str) -> None:
    if status:
        raise UnsupportedError(
            f"the CUDA kernel {what} failed with error {status}", hint="choose other providers with --ops"
        )


# `CUlaunchAttribute` with a value that is an int, and `CUlaunchConfig`. Packed bytes take a fraction of the time of a
# ctypes structure, and launching is most of what a short kernel costs.
_ATTRIBUTE = struct.Struct("@i4xi60x")
_LAUNCH = struct.Struct("@7I4xQQI4x")
_OVERLAPPED = ctypes.create_string_buffer(_ATTRIBUTE.pack(_AFTER_START, 1), _ATTRIBUTE.size)
_OVERLAPPED_AT = ctypes.addressof(_OVERLAPPED)
_Bytes, _Address = ctypes.c_char_p * 1, ctypes.c_void_p * 1


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of one device, with the shared memory it is launched with."""

    name: str
    handle: ctypes.c_void_p
    shared: int
    index: int

    def launch(
        self, grid: tuple[int, int], threads: int, arguments: bytes | ctypes.Structure, overlapped: bool = False
    ) -> None:
        """On the device's current stream. `arguments` is the kernel's one parameter, a struct by value.

        An `overlapped` kernel starts as soon as the one before it lets it, and waits itself for what that writes.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        attribute = _OVERLAPPED_AT if overlapped else 0
        how = _LAUNCH.pack(*grid, 1, threads, 1, 1, self.shared, stream, attribute, int(overlapped))
        # Packed bytes are the faster way to a struct, a ctypes structure the plainer one.
        parameters = _Bytes(arguments) if isinstance(arguments, bytes) else _Address(ctypes.addressof(arguments))
        status = _driver().cuLaunchKernelEx(how, self.handle, parameters, None)
        if status:
            _checked(status, self.name)


@cache
def _module(name: str, macros: tuple[str, ...], index: int) -> ctypes.c_void_p:
    module, context, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    driver, code = _driver(), compiled(name, macros)
    _checked(driver.cuDeviceGet(ctypes.byref(device), index), name)
    # torch's context, which nothing has yet made this thread's if all of its memory came from torch's cache.
    _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), name)
    _checked(driver.cuCtxSetCurrent(context), name)
    _checked(driver.cuModuleLoadData(ctypes.byref(module), code), name)
    return module


@cache
def kernel(name: str, symbol: str, macros: tuple[str, ...], shared: int, index: int) -> Kernel:
    """`symbol` of `<name>.cu` on the device with that index, with `shared` bytes of dynamic shared memory."""
    handle: Any = ctypes.c_void_p()
    module = _module(name, macros, index)
    _checked(_driver().cuModuleGetFunction(ctypes.byref(handle), module, symbol.encode()), symbol)
    if shared:
        _checked(_driver().cuFuncSetAttribute(handle, _MOST_SHARED, shared), symbol)
    return Kernel(symbol, handle, shared, index)
