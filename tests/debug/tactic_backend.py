"""A backend whose tactics of `silu_and_mul` are wrong in every way that tuning must see, and one that is right."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from k3hal.dispatch import Backend, provides

BACKEND = Backend("tactical", (), auto=False)
REPEATS = 40


def _right(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def faster(x: Tensor) -> Tensor:
    return _right(x)


def slower(x: Tensor) -> Tensor:
    return [_right(x) for _ in range(2 * REPEATS)][-1]


def wrong_and_fast(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2] * 0


def nan_tile(x: Tensor) -> Tensor:
    """Right but for one tile of rows, which only larger calls reach."""
    out = _right(x)
    if out.shape[0] > 4:
        out[4:8] = torch.nan
    return out


def unwritten(x: Tensor) -> Tensor:
    """The last column is whatever was in memory."""
    right = _right(x)
    out = torch.empty_like(right)
    out[..., :-1] = right[..., :-1]
    return out


def crash(x: Tensor) -> Tensor:
    os.abort()


def hang(x: Tensor) -> Tensor:
    time.sleep(600)
    return x


WRONG = {"wrong_and_fast": wrong_and_fast, "nan_tile": nan_tile, "unwritten": unwritten, "crash": crash}


@provides("silu_and_mul", name="mixed", tactics={**WRONG, "slower": slower, "faster": faster})
def mixed(x: Tensor) -> Tensor:
    """Right, and slow enough that a faster tactic shows on a busy machine."""
    return [_right(x) for _ in range(REPEATS)][-1]


@provides("silu_and_mul", name="hanging", tactics={"hang": hang})
def hanging(x: Tensor) -> Tensor:
    return _right(x)


@provides("silu_and_mul", name="broken", tactics={"faster": faster})
def broken(x: Tensor) -> Tensor:
    """Wrong itself, so that nothing can be tuned."""
    return wrong_and_fast(x)
