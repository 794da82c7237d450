"""`k3hal conform cross-compile`: every Triton kernel for GPUs that need not be here, within what those have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json
from k3hal.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from k3hal.conform.cross.run import Report

MOST_JOBS = 64


def cross_compile(
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="ARCH", help="Only this architecture; may be repeated.")
    ] = None,
    op: Annotated[str, typer.Option("--op", metavar="GLOB", help="Only these operators.")] = "*",
    tactics: Annotated[bool, typer.Option("--tactics", help="Every tactic, not the default ones alone.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes; 0 is one a core.")] = 0,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="Write a Markdown table of what kernels take.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Compile every Triton kernel as Kimi K3's calls launch it, for AMD's and NVIDIA's GPUs, without having one.

    Held against what a GPU has: shared memory, no registers spilled where a step of decoding launches it and at most
    1 KiB a thread elsewhere (gfx942, gfx950 and sm_90), matrix instructions for products of narrow operands. Exits with
    1 where a budget is broken or a kernel does not compile. Compiled kernels are kept in Triton's own cache.
    """
    from fnmatch import fnmatchcase
    from importlib.util import find_spec
    from time import perf_counter

    from k3hal.cli.conform import Bar
    from k3hal.conform.cross import compile as compiler
    from k3hal.conform.cross import run
    from k3hal.conform.cross.targets import TARGETS
    from k3hal.dispatch.registry import operator_names
    from k3hal.dispatch.words import nearest

    for name in target or ():
        if name not in TARGETS:
            raise UsageError(f"--target: unknown architecture {name!r}", hint=nearest(name, TARGETS, always_list=True))
    if not any(fnmatchcase(name, op) for name in operator_names()):
        raise UsageError(f"--op: no operator matches {op!r}", hint=nearest(op, operator_names()))
    if not 0 <= jobs <= MOST_JOBS:
        raise UsageError(f"--jobs is {jobs}", hint=f"from 0 to {MOST_JOBS}")
    if table and not (table.parent.is_dir() and not table.is_dir()):
        raise UsageError(f"--table {table}: no file can be there", hint="name a file in a folder that exists")
    if find_spec("triton") is None:
        raise UnsupportedError("triton is not installed", hint="pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET is 1: kernels are interpreted and not compiled", hint="unset it")
    chosen = tuple(target) if target else tuple(TARGETS)
    todo = compiler.jobs(chosen, lambda name: fnmatchcase(name, op), tactics=tactics)
    if not todo:
        raise UnsupportedError(f"no operator that matches {op!r} has a Triton provider")
    run.check_cache()
    start = perf_counter()
    with Bar() as note:
        done = run.compile_all(todo, jobs or min(os.cpu_count() or 1, len(todo)), note)
    report = run.Report(done, perf_counter() - start)
    if table:
        _write(table, "\n".join(run.table(done)) + "\n")
    if as_json:
        print_json(run.SCHEMA, report.to_json())
    else:
        _print(report)
    return 1 if report.broken else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"--table {path}: cannot write: {error.strerror}") from error


def _print(report: Report) -> None:
    by_target: dict[str, list[int]] = {}
    for one in report.done:
        by_target.setdefault(one.job.target, []).extend(made.figures.registers for made in one.kernels)
        for sample, reasons in one.refused:
            typer.echo(f"not for {one.job.target}: {one.job.op} {sample}, {one.job.provider}: {'; '.join(reasons)}")
    for line in report.broken:
        typer.echo(f"broken: {line}")
    for name, registers in by_target.items():
        typer.echo(f"{name:<8} {len(registers)} kernels, at most {max(registers, default=0)} registers a thread")
    kept = f"{len(report.broken)} broken" if report.broken else "all within budget"
    typer.echo(f"{sum(map(len, by_target.values()))} kernels, {kept}, {report.seconds:.0f} s")
