"""`k3hal op compare`: providers against the reference or each other, over samples, sweeps and invariants."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_cases import CaseFiles, DTypes, PresentDevice, SampleNames, Tags, cases_of, present, print_verdict
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k3hal.debug.case import Case
    from k3hal.debug.compare import How
    from k3hal.debug.verdict import Verdict

MAX_SEEDS = 100_000


def compare(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator's name.")],
    provider: Annotated[
        str, typer.Option("--provider", metavar="P[,Q]", help="Ids, names or backends; reference, composed, current.")
    ] = "current",
    against: Annotated[
        str, typer.Option("--against", metavar="reference|Q", help="reference is the fp64 golden.")
    ] = "reference",
    grid: Annotated[
        str,
        typer.Option(
            "--grid",
            metavar="AXES",
            help='Sweep: "tokens=1,64+-1;layout=dense,strided". Axes: tokens, batch, heads and context (numbers, '
            "ranges 63..65, edges 64+-1), layout (dense, strided, offset), kv (auto, bf16, fp8), state (given, "
            "recomputed, restored), tactic (all or names), mode (eager, graph), start (warm, cold).",
        ),
    ] = "",
    invariant: Annotated[
        list[str] | None,
        typer.Option("--invariant", metavar="NAME", help="split, batch, restore, pad, replay, decode, far, or all."),
    ] = None,
    sample: SampleNames = None,
    tag: Tags = None,
    dtype: DTypes = None,
    case: CaseFiles = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Seeds 0 to N - 1 of every sample.")] = 1,
    isolate: Annotated[bool, typer.Option("--isolate", help="Run every case in a child process.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For a case under --isolate.")] = 60.0,
    save: Annotated[Path, typer.Option("--save", metavar="DIR", help="Where the smallest failing case goes.")] = Path(
        "."
    ),
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Compare providers of OP with the reference, or with another provider; shrink and save what fails.

    Exits with 1 on a mismatch, 2 if nothing ran, 3 on a crash or a hang.
    """
    from k3hal.debug.compare import BAD, How, save_smallest
    from k3hal.debug.verdict import exit_code

    if not 1 <= seeds <= MAX_SEEDS:
        raise UsageError(f"--seeds is {seeds}", hint=f"from 1 to {MAX_SEEDS}")
    axes = _axes(op, grid, isolate, bool(invariant))
    how = How(present(device), against, isolate, timeout)
    cases = cases_of(op, names=sample, tags=tag, dtypes=dtype, files=case, seeds=range(seeds))
    failures, verdicts = [], []
    for one, verdict in _verdicts(cases, provider.split(","), how, axes, invariant or ()):
        verdicts.append(verdict)
        if verdict.status in BAD and "invariant" not in verdict.extra:
            failures.append((one, verdict))
        if not as_json:
            print_verdict(verdict)
    files = save_smallest(failures, how, save, lambda text: typer.echo(text, err=True))
    if as_json:
        _report(op, how, verdicts, files)
    else:
        _print_end(verdicts, files)
    return exit_code([verdict.status for verdict in verdicts])


def _print_end(verdicts: Sequence[Verdict], files: Mapping[str, Path]) -> None:
    """How many verdicts have each status, from best to worst, and what was kept."""
    from k3hal.debug.verdict import STATUSES

    counts = Counter(verdict.status for verdict in verdicts)
    typer.echo(", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "nothing to compare")
    for name, file in files.items():
        typer.echo(f"{name}: smallest failing case in {file}")


def _axes(op: str, grid: str, isolate: bool, invariant: bool) -> dict[str, tuple[Any, ...]]:
    """The grid's axes, all of which the operator has. Raises `UsageError` for ways to run that do not go together."""
    from k3hal.debug.grid import check_axes, parse_grid
    from k3hal.debug.grid_runs import ways_of
    from k3hal.dispatch.registry import get_operator

    if isolate and invariant:
        raise UsageError("--isolate does not run invariants", hint="give one of --isolate and --invariant")
    axes = parse_grid(grid)
    check_axes(get_operator(op).name, axes)
    if "graph" in axes.get("mode", ()) and axes.get("start", ("warm",)) != ("warm",):
        raise UsageError("--grid: mode=graph does not go with start=cold", hint="the first replay is the cold one")
    for flag, given in (("--isolate", isolate), ("--invariant", invariant)):
        if given and (odd := set(ways_of(axes)) - {"tactic"}):
            raise UsageError(f"{flag} does not go with the {min(odd)} axis")
    return axes


def _verdicts(
    cases: Iterator[Case],
    providers: Sequence[str],
    how: How,
    axes: Mapping[str, Sequence[Any]],
    invariants: Sequence[str],
) -> Iterator[tuple[Case, Verdict]]:
    from k3hal.debug.compare import compare_invariants
    from k3hal.debug.forks import Forks
    from k3hal.debug.grid import sweep
    from k3hal.debug.grid_runs import compare_ways, ways_of
    from k3hal.debug.target import tactic_names

    ways = ways_of(axes)
    with ExitStack() as stack:
        forks = stack.enter_context(Forks()) if "cold" in ways.get("start", ()) else None
        for point in itertools.chain.from_iterable(sweep(case, axes) for case in cases):
            if not invariants:
                yield from ((point, verdict) for verdict in compare_ways(point, providers, how, ways, forks))
                continue
            names = list(providers)
            if "tactic" in ways:
                names = [t for name in providers for t in tactic_names(point, name, how.device, ways["tactic"])]
            yield from compare_invariants([point], names, how, invariants)


def _report(op: str, how: How, verdicts: list[Verdict], files: Mapping[str, Path]) -> None:
    body = {"op": op, "device": how.device.id, "against": how.against}
    rows = [verdict.to_json() for verdict in verdicts]
    print_json("k3hal.op_compare/1", body | {"results": rows, "saved": {p: str(file) for p, file in files.items()}})
