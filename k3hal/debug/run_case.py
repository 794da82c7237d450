"""Runs one case with one target and says what came out; nothing is judged but the memory it touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.case_file import load_case
from k3hal.debug.check import describe
from k3hal.debug.execute import execute
from k3hal.debug.judge import largest_error
from k3hal.debug.memory import same_bytes
from k3hal.debug.target import Target, find_target
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

RUN = f"{__name__}:job"


@dataclass(frozen=True, slots=True)
class Runs:
    """How often, after how many idle seconds before each run, and whether uninitialised memory is NaN."""

    repeat: int = 2
    cold: float = 0.0
    poison: bool = True


def run_case(case: Case, target: Target, runs: Runs) -> dict[str, Any]:
    """The outputs' facts of the first run, and what is wrong with the memory or between runs."""
    row: dict[str, Any] = {"case": case.id, "provider": target.id, "seconds": None, "outputs": {}, "problems": []}
    done = []
    try:
        for _ in range(runs.repeat):
            time.sleep(runs.cold)
            done.append(execute(get_operator(case.op), target, case.args, poisoned=runs.poison))
    except Exception as error:  # noqa: BLE001 - what a provider raises is its result
        return row | {"problems": [describe(error)]}
    first = done[0]
    problems = list(first.problems)
    for name in first.outputs:
        problems += _differences(name, [run.outputs[name] for run in done])
    outputs = {name: _facts(value) for name, value in first.outputs.items()}
    return row | {"seconds": first.seconds, "outputs": outputs, "problems": problems}


def _differences(name: str, runs: list[Tensor]) -> list[str]:
    """How many runs gave other bytes than the first, and where the first of these is farthest from it."""
    others = [n for n, value in enumerate(runs) if not same_bytes(value, runs[0])]
    if not others:
        return []
    where = largest_error(runs[others[0]], runs[0])
    seen = f"run {others[0] + 1}: {where}" if where else f"run {others[0] + 1}"
    return [f"{name} differs between runs: {len(others)} of {len(runs)} are not as the first; {seen}"]


def job(
    report: Callable[[Any], None], *, case: str, target: str, device: str, repeat: int, cold: float, poison: bool
) -> None:
    """`run_case` in a process of its own."""
    loaded = load_case(case)
    report(run_case(loaded, find_target(loaded, target, probe(device)), Runs(repeat, cold, poison)))


def _facts(value: Tensor) -> dict[str, Any]:
    """Shape, dtype and the spread of the finite values."""
    wide = value.double()
    finite = wide[torch.isfinite(wide)]
    numbers = {"min": finite.min(), "max": finite.max(), "rms": finite.square().mean().sqrt()} if len(finite) else {}
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "nonfinite": value.numel() - len(finite),
        **{name: float(number) for name, number in numbers.items()},
    }
