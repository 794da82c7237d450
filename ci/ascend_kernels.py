"""Compiles the Ascend backend's Triton kernels by triton-ascend, as far as that goes without CANN: to linalg.

    python -m venv venv; venv/bin/pip install triton-ascend==3.2.0 numpy pybind11 decorator packaging
    PYTHONPATH=ci/typing venv/bin/python -P ci/ascend_kernels.py

Of an environment of its own: triton-ascend takes the name `triton`. It needs no torch, whose place a module without
anything takes here. Exits with 1 where a kernel does not get as far.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

STRIDES = ("q_stride", "k_stride", "v_stride", "g_stride", "beta_stride", "heads")
KDA = {
    **dict.fromkeys(("q", "k", "v", "out"), "*bf16"), **dict.fromkeys(("g", "beta", "state"), "*fp32"),
    **dict.fromkeys(STRIDES, "i32"), "slots": "*i32", "state_stride": "i64", "scale": "fp32",
}  # fmt: skip
WIDE = {**KDA, **dict.fromkeys(("q", "k", "v", "out"), "*fp32")}
KERNELS: tuple[tuple[str, str, dict[str, str], dict[str, Any]], ...] = (
    ("kda_recurrent", "_kda_recurrent", KDA, {"DIM": 128, "ROWS": 32}),
    ("kda_recurrent", "_kda_recurrent", WIDE, {"DIM": 128, "ROWS": 32}),
    ("kda_recurrent", "_kda_recurrent", KDA, {"DIM": 32, "ROWS": 32}),
)
"""Module, kernel, types of its arguments, constants."""


def main() -> int:
    sys.modules.setdefault("torch", _Torch("torch"))
    failed = 0
    for module, name, types, constants in KERNELS:
        kernel = getattr(import_module(f"k3hal.backends.ascend.kernels.{module}"), name)
        problem = lowered(kernel, types, constants)
        failed += bool(problem)
        print(f"{'FAIL' if problem else 'ok'}  {name} {constants} q {types['q']}  {problem}")
    return 1 if failed else 0


class _Torch(ModuleType):
    """What the kernels' modules name in annotations."""

    Tensor = object


def lowered(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Why a kernel does not become linalg; empty where it does, whatever comes after that."""
    # triton-ascend's, whose names are not those of the Triton that types are checked against.
    source: Any = import_module("triton.compiler").ASTSource
    target: Any = import_module("triton.backends.compiler").GPUTarget("npu", "Ascend910B", 0)
    compiled: Any = import_module("triton").compile
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        said = "it compiled to the end"
        try:
            compiled(source(fn=kernel, signature=signature, constants=constants), target)
        except Exception as error:  # noqa: BLE001 - without CANN the last stage always fails, by any of many errors
            said = str(error).strip()
        made = list(Path(folder).rglob("*.ttadapter"))
    return "" if made else said[:400]


if __name__ == "__main__":
    sys.exit(main())
