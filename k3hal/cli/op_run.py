"""`k3hal op run`: one operator, one provider, and what it gave; nothing is judged but the memory it touched."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_cases import CaseFiles, DTypes, PresentDevice, SampleNames, Seed, Tags, cases_of, present
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3hal.debug.case import Case
    from k3hal.debug.run_case import Runs
    from k3hal.dispatch.device import DeviceDescription

_MAX_IDLE = 3600


def run_operator(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator's name.")],
    provider: Annotated[
        str, typer.Option("--provider", metavar="P", help="An id, name or backend; reference, composed, current.")
    ] = "current",
    tactic: Annotated[
        str | None, typer.Option("--tactic", metavar="NAME|all", help="Of the provider; default: as selected.")
    ] = None,
    sample: SampleNames = None,
    tag: Tags = None,
    dtype: DTypes = None,
    case: CaseFiles = None,
    seed: Seed = 0,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs of each case; all must agree.")] = 2,
    cold: Annotated[float, typer.Option("--cold", metavar="SECONDS", help="Idle for so long before every run.")] = 0.0,
    poison: Annotated[bool, typer.Option("--poison/--no-poison", help="Whether uninitialised memory is NaN.")] = True,
    isolate: Annotated[bool, typer.Option("--isolate", help="Run every case in a process of its own.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For a case under --isolate.")] = 60.0,
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Run a provider of OP and show its outputs; uninitialised memory is NaN, every argument stands between canaries.

    Exits with 1 if memory was touched that may not be, if runs differ, or if it raised, with 3 on a crash or a hang
    under --isolate; `op compare` judges values.
    """
    from k3hal.debug.run_case import Runs
    from k3hal.debug.target import tactic_names

    if repeat < 1:
        raise UsageError(f"--repeat is {repeat}", hint="from 1 on")
    if not 0 <= cold <= _MAX_IDLE:
        raise UsageError(f"--cold is {cold:g}", hint=f"seconds from 0 to {_MAX_IDLE}")
    machine, rows, runs = present(device), [], Runs(repeat, cold, poison)
    with ExitStack() as stack:
        run = _runner(stack, machine, runs, timeout if isolate else None)
        for one in cases_of(op, names=sample, tags=tag, dtypes=dtype, files=case, seeds=(seed,)):
            for name in tactic_names(one, provider, machine, (tactic,)) if tactic else [provider]:
                rows.append(run(one, name))
                if not as_json:
                    _print(rows[-1])
    if as_json:
        print_json("k3hal.op_run/1", {"op": op, "device": machine.id, "results": rows})
    if any(row.get("ended") for row in rows):
        return 3
    return 1 if any(row["problems"] for row in rows) else 0


def _runner(
    stack: ExitStack, machine: DeviceDescription, runs: Runs, timeout: float | None
) -> Callable[[Case, str], dict[str, Any]]:
    """What runs a case with a named target: here, or with a time limit in a process of its own."""
    from k3hal.debug.case_files import CaseFiles as Files
    from k3hal.debug.forks import Forks
    from k3hal.debug.run_case import RUN, run_case
    from k3hal.debug.target import find_target

    if timeout is None:
        return lambda case, name: run_case(case, find_target(case, name, machine), runs)
    files, forks = stack.enter_context(Files()), stack.enter_context(Forks())

    def isolated(case: Case, name: str) -> dict[str, Any]:
        target = find_target(case, name, machine).id
        outcome = forks.run(RUN, timeout, case=files.case(case), target=name, device=machine.id, **asdict(runs))
        if outcome.status == "Done":
            return outcome.report
        row = {"case": case.id, "provider": target, "seconds": None, "outputs": {}}
        return row | {"problems": [f"{outcome.status}: {outcome.why}"], "ended": outcome.status}

    return isolated


def _print(row: dict[str, Any]) -> None:
    took = "" if row["seconds"] is None else f"  {1e3 * row['seconds']:.2f} ms, cold"
    typer.echo(f"{row['provider']}  {row['case']}{took}")
    for name, facts in row["outputs"].items():
        spread = f"min {facts['min']:.4g} max {facts['max']:.4g} rms {facts['rms']:.4g}" if "rms" in facts else ""
        shape = "x".join(map(str, facts["shape"]))
        typer.echo(f"    {name:<12} {facts['dtype']} {shape}  {facts['nonfinite']} not finite  {spread}".rstrip())
    for problem in row["problems"]:
        typer.echo(f"    {problem}")
