"""A backend whose providers of `silu_and_mul` are wrong in ways that must not end a sweep."""

from __future__ import annotations

import itertools
import os
import signal
import time

import torch
from torch import Tensor

from k3hal.dispatch import Backend, Call, No, Yes, provides

BACKEND = Backend("faulty", (), auto=False)
_CALLS = itertools.count()


@provides("silu_and_mul", name="crash")
def crash(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x


@provides("silu_and_mul", name="hang")
def hang(x: Tensor) -> Tensor:
    time.sleep(600)
    return x


def _never(call: Call) -> Yes | No:
    return No("needs a chip that nobody has")


@provides("silu_and_mul", name="never", supports=_never)
def never(x: Tensor) -> Tensor:
    return x


@provides("silu_and_mul", name="swapped")
def swapped(x: Tensor) -> Tensor:
    up, gate = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@provides("silu_and_mul", name="talks")
def talks(x: Tensor) -> Tensor:
    """Right, and noisy on standard output."""
    print("hello from Python")
    os.write(1, b"hello from a library\n")
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@provides("silu_and_mul", name="leaves")
def leaves(x: Tensor) -> Tensor:
    raise SystemExit(0)


@provides("silu_and_mul", name="late_row")
def late_row(x: Tensor) -> Tensor:
    """Wrong from the third row on."""
    gate, up = x.float().chunk(2, dim=-1)
    out = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    out[2:] = 0
    return out


@provides("silu_and_mul", name="third_call")
def third_call(x: Tensor) -> Tensor:
    """Adds 1 to one element in every third call, counted from the start of the process."""
    gate, up = x.float().chunk(2, dim=-1)
    out = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    if next(_CALLS) % 3 == 2:
        out[1, 2] += 1
    return out
