"""`k3hal op run`: one operator, one provider, and what it gave; nothing is judged but the memory it touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_cases import CaseFiles, DTypes, PresentDevice, SampleNames, Seed, Tags, cases_of, present
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from k3hal.debug.case import Case
    from k3hal.debug.target import Target


def run_operator(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator's name.")],
    provider: Annotated[
        str, typer.Option("--provider", metavar="P", help="An id, name or backend; reference, composed, current.")
    ] = "current",
    sample: SampleNames = None,
    tag: Tags = None,
    dtype: DTypes = None,
    case: CaseFiles = None,
    seed: Seed = 0,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs of each case; all must agree.")] = 2,
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Run a provider of OP and show its outputs; uninitialised memory is NaN, every argument stands between canaries.

    Exits with 1 if memory was touched that may not be, if runs differ, or if it raised; `op compare` judges values.
    """
    from k3hal.debug.target import find_target

    if repeat < 1:
        raise UsageError(f"--repeat is {repeat}", hint="from 1 on")
    machine, rows = present(device), []
    for one in cases_of(op, names=sample, tags=tag, dtypes=dtype, files=case, seeds=(seed,)):
        rows.append(_run(one, find_target(one, provider, machine), repeat))
        if not as_json:
            _print(rows[-1])
    if as_json:
        print_json("k3hal.op_run/1", {"op": op, "device": machine.id, "results": rows})
    return 1 if any(row["problems"] for row in rows) else 0


def _run(case: Case, target: Target, repeat: int) -> dict[str, Any]:
    from k3hal.debug.check import describe
    from k3hal.debug.execute import execute
    from k3hal.debug.memory import same_bytes
    from k3hal.dispatch.registry import get_operator

    row: dict[str, Any] = {"case": case.id, "provider": target.id, "seconds": None, "outputs": {}, "problems": []}
    try:
        runs = [execute(get_operator(case.op), target, case.args) for _ in range(repeat)]
    except Exception as error:  # noqa: BLE001 - what a provider raises is its result
        return row | {"problems": [describe(error)]}
    first = runs[0]
    problems = list(first.problems)
    for name, value in first.outputs.items():
        if any(not same_bytes(value, other.outputs[name]) for other in runs[1:]):
            problems.append(f"{name} differs between runs")
    outputs = {name: _facts(value) for name, value in first.outputs.items()}
    return row | {"seconds": first.seconds, "outputs": outputs, "problems": problems}


def _facts(value: Tensor) -> dict[str, Any]:
    """Shape, dtype and the spread of the finite values."""
    import torch

    wide = value.double()
    finite = wide[torch.isfinite(wide)]
    numbers = {"min": finite.min(), "max": finite.max(), "rms": finite.square().mean().sqrt()} if len(finite) else {}
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "nonfinite": value.numel() - len(finite),
        **{name: float(number) for name, number in numbers.items()},
    }


def _print(row: dict[str, Any]) -> None:
    took = "" if row["seconds"] is None else f"  {1e3 * row['seconds']:.2f} ms, cold"
    typer.echo(f"{row['provider']}  {row['case']}{took}")
    for name, facts in row["outputs"].items():
        spread = f"min {facts['min']:.4g} max {facts['max']:.4g} rms {facts['rms']:.4g}" if "rms" in facts else ""
        shape = "x".join(map(str, facts["shape"]))
        typer.echo(f"    {name:<12} {facts['dtype']} {shape}  {facts['nonfinite']} not finite  {spread}".rstrip())
    for problem in row["problems"]:
        typer.echo(f"    {problem}")
