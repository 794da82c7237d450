"""A backend whose providers of `silu_and_mul` are right, wrong, deadly or fickle."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.dispatch import Backend, Call, Needs, No, Yes, provides

BACKEND = Backend("broken", (), auto=False)
DEADLY_ROWS = 17


def _right(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def _fickle(call: Call) -> Yes | No:
    """Yes in the process that judges, No in the one that asks first."""
    return Yes() if call.dtype == "float32" or Path(sys.argv[0]).name == "worker.py" else No("not today")


def _crashing(call: Call) -> Yes | No:
    raise ZeroDivisionError("no heads")


@provides("silu_and_mul", name="right", needs=Needs(dtypes=("float32",)))
def right(x: Tensor) -> Tensor:
    return _right(x)


@provides("silu_and_mul", name="late_row")
def late_row(x: Tensor) -> Tensor:
    """Zero from the third row on."""
    out = _right(x)
    out[2:] = 0
    return out


@provides("silu_and_mul", name="raises")
def raises(x: Tensor) -> Tensor:
    if x.shape[0] == DEADLY_ROWS:
        raise ValueError("seventeen rows")
    return _right(x)


@provides("silu_and_mul", name="deadly")
def deadly(x: Tensor) -> Tensor:
    """Crashes on many rows, hangs on strided ones."""
    if x.shape[0] == DEADLY_ROWS:
        os.kill(os.getpid(), signal.SIGSEGV)
    if x.shape[0] > 1 and x.stride(0) > x.shape[1]:
        time.sleep(600)
    return _right(x)


@provides("silu_and_mul", name="fickle", supports=_fickle)
def fickle(x: Tensor) -> Tensor:
    return _right(x)


@provides("silu_and_mul", name="crashing", supports=_crashing)
def crashing(x: Tensor) -> Tensor:
    return _right(x)


@provides("silu_and_mul", name="never", needs=Needs(dtypes=("float64",)))
def never(x: Tensor) -> Tensor:
    return torch.zeros_like(x)
