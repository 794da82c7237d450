"""Compiles the kernels that a provider launches for Kimi K3 on a GPU, launching none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from k3hal.conform.cross.calls import Shaped, full_size_calls
from k3hal.conform.cross.figures import Figures, figures_of
from k3hal.conform.cross.targets import TARGETS, CrossTarget
from k3hal.dispatch.call import Call, No
from k3hal.dispatch.errors import BackendError
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.packages import INSTALLED
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.select import offered
from k3hal.dispatch.stand_in import standing_in


@dataclass(frozen=True, slots=True)
class Job:
    """All kernels of one provider's tactic of an operator, for one target."""

    op: str
    provider: str
    tactic: str
    target: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as `samples` launch it; `decodes`: a step of decoding may."""

    job: Job
    kernel: str
    samples: tuple[str, ...]
    decodes: bool
    figures: Figures


@dataclass(frozen=True, slots=True)
class Done:
    """What a job gave: kernels, or why there are none; `refused` are the samples that the provider says No to, with its
    reasons."""

    job: Job
    kernels: tuple[Compiled, ...] = ()
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    problem: str = ""


def jobs(targets: tuple[str, ...], ops: Callable[[str], bool], *, tactics: bool) -> list[Job]:
    """A job for every Triton provider of the operators, in a fixed order; with `tactics` one for every tactic."""
    out = []
    for provider in sorted(default_registry().providers, key=lambda p: (p.op, p.id)):
        if provider.backend == "triton" and ops(provider.op):
            for target in targets:
                names = _tactics(provider, TARGETS[target]) if tactics else (DEFAULT,)
                out += [Job(provider.op, provider.id, name, target) for name in names]
    return out


def _tactics(provider: Provider, target: CrossTarget) -> tuple[str, ...]:
    """Those of any class of calls among the operator's full-size samples."""
    found: dict[str, None] = {}
    for shaped in _shaped(provider.op):
        found |= dict.fromkeys(offered(provider, _call(provider.op, shaped, target)))
    return tuple(found)


def run(job: Job) -> Done:
    """Compile a job's kernels. A failure of the compiler or of the launching code is a result too."""
    target, operator = TARGETS[job.target], get_operator(job.op)
    provider = next(p for p in default_registry().of(job.op) if p.id == job.provider)
    found: dict[int, tuple[str, list[str], bool, Any]] = {}
    refused: dict[str, tuple[str, ...]] = {}
    try:
        for shaped in _shaped(job.op):
            call = _call(job.op, shaped, target)
            said = provider.answer(call)
            if isinstance(said, No):
                refused[shaped.sample.name] = said.reasons
                continue
            tactics = offered(provider, call)
            if job.tactic in tactics:
                _launch(operator, provider, tactics[job.tactic], shaped, target, found)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Done(job, problem=f"{type(error).__name__}: {' '.join(lines[:3])[:400]}")
    kernels = [
        Compiled(job, name, tuple(samples), decodes, figures_of(kernel))
        for name, samples, decodes, kernel in found.values()
    ]
    return Done(job, tuple(kernels), tuple(refused.items()))


def _launch(
    operator: Operator,
    provider: Provider,
    fn: Callable[..., Any],
    shaped: Shaped,
    target: CrossTarget,
    found: dict[int, tuple[str, list[str], bool, Any]],
) -> None:
    """Add what a sample would launch to `found`, by the identity of the compiled kernel."""
    args = dict(shaped.args)
    if provider.prepare:
        args |= provider.prepare(**{name: args[name] for name in operator.weights})
    with standing_in(target.stand_in), _compiling(target) as made:
        fn(**args)
    for name, kernel in made:
        _, samples, decodes, _ = found.setdefault(id(kernel), (name, [], False, kernel))
        if shaped.sample.name not in samples:
            samples.append(shaped.sample.name)
        found[id(kernel)] = (name, samples, decodes or shaped.decodes, kernel)


@cache
def _shaped(op: str) -> tuple[Shaped, ...]:
    return tuple(full_size_calls(get_operator(op)))


def _call(op: str, shaped: Shaped, target: CrossTarget) -> Call:
    sample = shaped.sample
    return Call(op, target.device(dict(INSTALLED)), sample.dtype, sample.phase, sample.dims)


class _Driver:
    """In place of Triton's driver: a device that is only compiled for."""

    def __init__(self, target: CrossTarget) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.triton_arch, target.lanes)
        # Triton keeps what it compiled by the number of the device.
        self._number = zlib.crc32(target.arch.encode())

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling(target: CrossTarget) -> Iterator[list[tuple[str, Any]]]:
    """Within, a launch compiles for the target and nothing more; gives the names and compiled kernels in order.

    Triton keeps the target afterwards: a process that does this launches nothing any more.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    made: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel is None:
            raise BackendError(f"Triton did not compile {self.fn.__name__}")
        made.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_Driver(target))  # pyright: ignore[reportArgumentType]
    try:
        yield made
    finally:
        JITFunction.run = launch
