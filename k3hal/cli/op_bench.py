"""`k3hal op bench`: how fast providers are, against this machine's own ceilings; never for an unverified output."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_cases import CaseFiles, DTypes, PresentDevice, SampleNames, Seed, Tags, cases_of, present
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3hal.debug.bench import Ceilings, Timing
    from k3hal.debug.case import Case
    from k3hal.dispatch.device import DeviceDescription


def bench(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator's name.")],
    provider: Annotated[
        str, typer.Option("--provider", metavar="P[,Q]", help="Default: every provider that may run on the device.")
    ] = "",
    sample: SampleNames = None,
    tag: Tags = None,
    dtype: DTypes = None,
    case: CaseFiles = None,
    seed: Seed = 0,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="To spend on each timing.")] = 0.5,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a roofline as FILE.png and FILE.svg.")
    ] = None,
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Time providers of OP: each case is verified first, and only what passes is timed.

    Exits with 1 if a provider failed its verification, 2 if nothing ran.
    """
    from k3hal.debug.bench import bench_cases, measure_ceilings
    from k3hal.debug.roofline import save_roofline
    from k3hal.debug.verdict import exit_code

    if not 0 < seconds <= 600:
        raise UsageError(f"--seconds is {seconds:g}", hint="above 0, at most 600")
    machine = present(device)
    cases = list(cases_of(op, names=sample, tags=tag, dtypes=dtype, files=case, seeds=(seed,)))
    names = provider.split(",") if provider else _providers(op, machine, cases)
    ceilings = {kind: measure_ceilings(machine, kind) for kind in dict.fromkeys(case.dtype for case in cases)}
    if not as_json:
        _print_ceilings(ceilings, machine)
    timings = []
    for timing in bench_cases(cases, names, machine, ceilings, seconds):
        timings.append(timing)
        if not as_json:
            _print(timing)
    files = save_roofline(timings, ceilings, f"{op} on {machine.title or machine.id}", plot) if plot else []
    if as_json:
        limits = {kind: asdict(limit) for kind, limit in ceilings.items()}
        rows = [timing.to_json() for timing in timings]
        print_json(
            "k3hal.op_bench/1",
            {"op": op, "device": machine.id, "ceilings": limits, "results": rows, "plots": [str(f) for f in files]},
        )
    return exit_code([timing.verdict.status for timing in timings])


def _providers(op: str, machine: DeviceDescription, cases: list[Case]) -> list[str]:
    """Providers that selection may take and that run any of the cases, and on a CPU the reference beside them."""
    from k3hal.dispatch.registry import default_registry

    registry = default_registry()
    mine = [p for p in registry.of(op) if registry.backends[p.backend].auto]
    found = [p.id for p in mine if any(p.answer(case.call(machine)) for case in cases)]
    return [*found, "reference"] if machine.vendor == "cpu" else found


def _print_ceilings(ceilings: Mapping[str, Ceilings], machine: DeviceDescription) -> None:
    for dtype, limit in ceilings.items():
        typer.echo(
            f"{machine.id}: copy {limit.bytes_per_s / 1e9:.1f} GB/s, {dtype} matmul "
            f"{limit.flops_per_s / 1e9:.1f} GFLOP/s, measured now, {limit.threads} threads"
        )


def _print(timing: Timing) -> None:
    verdict = timing.verdict
    head = f"{verdict.provider:<20} {verdict.case:<48}"
    if timing.seconds is None or timing.roofline is None or timing.spread is None:
        typer.echo(f"{head} {verdict.status}, not timed: {'; '.join(verdict.reasons)}")
        return
    typer.echo(
        f"{head} {1e6 * timing.seconds:10.1f} us  {timing.flops / timing.seconds / 1e9:8.2f} GFLOP/s  "
        f"{timing.bytes / timing.seconds / 1e9:8.2f} GB/s  {100 * timing.roofline:5.1f} % of the roofline  "
        f"spread {timing.spread:.2f}"
        + (f"  in a row {1e6 * timing.in_a_row:.1f} us ({timing.method})" if timing.in_a_row else "")
    )
