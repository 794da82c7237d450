"""`k3hal op bench --model-only`: the floors of operators on a chip that need not be here; nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.dispatch.device import DeviceDescription
    from k3hal.dispatch.operator import Operator, Sample

_OF_RUNS = ("provider", "case", "seed", "seconds", "cache", "timeout", "limit", "failing", "plot")
"""Flags that say what runs or how, and mean nothing where nothing does."""


def check_flags(ctx: typer.Context) -> None:
    """Raise `UsageError` for a flag that does not go with `--model-only`."""
    for name in _OF_RUNS:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--{name} does not go with --model-only",
                hint="nothing runs; it takes --sample, --tag, --dtype, --device, --save and --json",
            )


def bench_model(
    op: str,
    machine: DeviceDescription,
    samples: Sequence[tuple[Operator, Sequence[Sample]]],
    save: Sequence[Path],
    as_json: bool,
) -> int:
    """Print, or keep, the floors of the samples on `machine`. Exits with 2 where there is none to print."""
    from k3hal.bench.modelled import SCHEMA, modelled_report, modelled_tables
    from k3hal.bench.save import check_targets
    from k3hal.bench.save import save as keep
    from k3hal.dispatch.assemble import build_selector

    check_targets(save)
    report = modelled_report(op, machine, samples, build_selector(None, "warn"))
    for target in save:
        keep({"schema": SCHEMA, **report}, target)
    if as_json:
        print_json(SCHEMA, report)
    else:
        typer.echo("\n".join(table.text() for table in modelled_tables(report)))
    return 0 if report["results"] else 2
