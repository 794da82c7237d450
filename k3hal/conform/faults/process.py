"""Faults of any provider's Python: another structure returned, global state changed, late threads, the process left."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

PROCESS = Catalogue()
fault = PROCESS.fault


@fault("sigmoid_gate", "linear")
def result_in_a_tuple(right: Right, args: Arguments) -> Any:
    """A binding that always returns a tuple is passed through for a contract of one tensor."""
    return (right(args),)


@fault("sigmoid_gate")
def result_in_a_list(right: Right, args: Arguments) -> Any:
    """A binding's list of tensors is passed through."""
    return [right(args)]


@fault("sigmoid_gate")
def result_requires_grad(right: Right, args: Arguments) -> Any:
    """The result is a training library's, which wants a gradient for it."""
    return right(args).requires_grad_()


@fault("sigmoid_gate", "linear")
def default_dtype_left(right: Right, args: Arguments) -> Any:
    """The default dtype is set for the provider's own tensors and not put back."""
    torch.set_default_dtype(torch.bfloat16)
    return right(args)


@fault("linear")
def tf32_left_on(right: Right, args: Arguments) -> Any:
    """TF32 is allowed for the whole process."""
    out = right(args)
    torch.set_float32_matmul_precision("high")
    return out


@fault("sigmoid_gate")
def seeds_the_process(right: Right, args: Arguments) -> Any:
    """A tuner makes itself repeatable by seeding everybody's generators."""
    torch.manual_seed(0)
    random.seed(0)
    return right(args)


@fault("sigmoid_gate")
def environment_changed(right: Right, args: Arguments) -> Any:
    """A compiler is configured through an environment variable that stays set."""
    os.environ["SEEDED_FAULT"] = str(right.calls)
    return right(args)


@fault("sigmoid_gate", "linear", "kda_decode")
def result_written_late(right: Right, args: Arguments) -> Any:
    """A thread of its own still clears what it takes for its workspace when the result has been handed out."""
    out = right(args)
    threading.Timer(0.005, _clear, (out,)).start()
    return out


@fault("sigmoid_gate", "linear", "kda_decode")
def argument_written_late(right: Right, args: Arguments) -> Any:
    """A pool of threads still uses an input as scratch memory when the call has returned."""
    pool = right.memory.setdefault("pool", ThreadPoolExecutor(1))
    pool.submit(lambda x: (time.sleep(0.005), _clear(x)), next(iter(args.values())))
    return right(args)


def _clear(tensor: Tensor) -> None:
    with torch.inference_mode():
        tensor.zero_()


@fault("sigmoid_gate", "linear")
def leaves_the_process(right: Right, args: Arguments) -> Any:
    """A tool's main function is called as a library, and exits with success when it is done."""
    right(args)
    sys.exit(0)
