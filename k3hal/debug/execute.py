"""Runs a target once on guarded copies of a case's arguments."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.contain import contained
from k3hal.debug.golden import named_outputs
from k3hal.debug.late import thread_ids, waited_for_new
from k3hal.debug.memory import GuardedCopy, PoisonedEmpty, same_bytes
from k3hal.debug.target import Target
from k3hal.dispatch.operator import Operator


@dataclass(frozen=True, slots=True)
class Execution:
    """What one run gave: `outputs` by name, `problems` with the memory it touched or the global state it changed,
    and its `seconds`.

    `aliases` maps returned outputs to the argument whose memory they lie in; `dense` holds the returned outputs that
    are contiguous. `returned` are the outputs where the target put them, the mutated arguments left out.
    """

    outputs: dict[str, Tensor]
    problems: tuple[str, ...]
    seconds: float
    aliases: Mapping[str, str]
    dense: frozenset[str]
    returned: Mapping[str, Tensor]


@dataclass(slots=True)
class Calls:
    """Calls of one target that make up one check: each gives its outputs, `problems` what any of them did wrong."""

    operator: Operator
    target: Target
    problems: list[str] = field(default_factory=list)

    def __call__(self, args: Mapping[str, Any]) -> dict[str, Tensor]:
        """`execute`'s outputs."""
        run = execute(self.operator, self.target, args)
        self.note(run.problems)
        return run.outputs

    def note(self, problems: Iterable[str]) -> None:
        """Remember problems, each once."""
        self.problems += [problem for problem in problems if problem not in self.problems]


def execute(
    operator: Operator, target: Target, args: Mapping[str, Any], *, poisoned: bool = True, where: str = "cpu"
) -> Execution:
    """Run `target` on copies of `args`, its weights laid out as it wants; outputs come back on torch device `where`.
    Whatever it raises passes through as `contained` has it.

    Copies keep strides, offsets and shared memory, and stand between canaries; with `poisoned` uninitialised memory
    is NaN. After a call that left threads running what it gave and touched is looked at
    again, a moment later. `seconds` is one cold call and no measurement of speed.
    """
    copy, threads = GuardedCopy(args, target.device), thread_ids()
    call = dict(copy.args)
    with torch.inference_mode():
        with contained(copy.device) as changes:
            if target.prepare:
                call |= target.prepare(**{name: call[name] for name in operator.weights})
            _wait(copy.device)
            begun = time.perf_counter()
            with PoisonedEmpty() if poisoned else nullcontext():
                returned = target.fn(**call)
            # Before anything is copied: what a kernel did wrong shows here, and the copies are no part of its time.
            _wait(copy.device)
            seconds = time.perf_counter() - begun
        outputs = named_outputs(operator, returned, call)
        kept = {name: value.detach().to(where, copy=True) for name, value in outputs.items()}
    late = written_late(outputs, kept) if waited_for_new(threads) else []
    # A provider's `prepare` may hand a weight back as it is: that it is unchanged is checked in either case.
    problems = [*copy.problems(operator.mutates), *changes, *late]
    fresh = {name: value for name, value in outputs.items() if name not in operator.mutates}
    aliases = {name: alias for name, value in fresh.items() if (alias := copy.alias_of(value))}
    dense = frozenset(name for name, value in fresh.items() if value.is_contiguous())
    return Execution(kept, tuple(problems), seconds, aliases, dense, fresh)


def written_late(now: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> list[str]:
    """Which outputs are no longer what they were when the call returned, in words; `now` is where it put them."""
    differ = [name for name, value in now.items() if not same_bytes(value.detach().to(then[name].device), then[name])]
    return [f"{name} was written after the call had returned" for name in differ]


def _wait(device: torch.device) -> None:
    """Until the device has done all it was given; raises what went wrong there."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
