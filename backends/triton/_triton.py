"""What every Triton provider asks of a machine, and Triton's interpreter put right."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from k3hal.dispatch import Needs
from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.emulated import EMULATED

INTERPRETER = "triton_interpreter"
FP8_ARCH = 89
NEEDS = Needs(packages={"triton": ">=3.6"})


def runs(call: Call) -> Answer:
    """Whether Triton kernels run at all: compiled on a GPU, interpreted on a CPU."""
    if call.device.vendor != "cpu" and EMULATED not in call.device.features:
        return Yes()
    if INTERPRETER in call.device.features:
        return Yes("interpreted")
    return No("on a CPU it needs Triton's interpreter: TRITON_INTERPRET=1")


def cache_supported(call: Call) -> Answer:
    """Whether kernels of the paged MLA cache run: of the activation dtype, or fp8."""
    kind = call.dims.get("kv_dtype", call.dtype)
    if kind not in (call.dtype, "float8_e4m3fn"):
        return No(f"needs kv_dtype {call.dtype} or float8_e4m3fn, this is {kind}")
    if kind == "float8_e4m3fn" and call.device.vendor == "nvidia" and call.device.arch_number < FP8_ARCH:
        return No(f"Triton converts float8_e4m3fn from sm_{FP8_ARCH} on, this is {call.device.arch}")
    return runs(call)


@cache
def kernels(name: str) -> ModuleType:
    """The kernel module `backends/triton/kernels/<name>.py`."""
    _mend_interpreter()
    return import_module(f"k3hal.backends.triton.kernels.{name}")


@cache
def _mend_interpreter() -> None:
    """Triton's interpreter (seen in 3.6 to 3.9) multiplies the bit patterns of bfloat16 operands in `tl.dot`, and
    rounds fp32 to bfloat16 and fp8 towards zero or away from it at ties, where every GPU rounds to nearest even."""
    from triton import knobs

    if knobs.runtime.interpret:
        import_module("k3hal.backends.triton._interpreter").mend()
