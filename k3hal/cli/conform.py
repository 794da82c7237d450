"""`k3hal conform`: prove the providers of this machine, and check, compare and show such proofs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.conform_contracts import contracts
from k3hal.cli.conform_cross import cross_compile
from k3hal.cli.conform_selftest import selftest
from k3hal.cli.op_cases import PresentDevice, present
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(help="Prove the operators of this machine, and check, compare and show such proofs.")
Package = Annotated[Path, typer.Argument(metavar="DIR", help="A package that `conform run` wrote.")]
Models = Annotated[
    bool | None,
    typer.Option(
        "--end-to-end/--no-end-to-end",
        help="Run small models too, which E4 takes. Default: where all operators are judged.",
        show_default=False,
    ),
]
MOST_JOBS = 64
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM


@app.command()
def run(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The package's folder; an earlier one is replaced.")
    ],
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="NAME", help="Only this backend's providers.")
    ] = None,
    op: Annotated[str, typer.Option("--op", metavar="GLOB", help="Only these operators.")] = "*",
    quick: Annotated[bool, typer.Option("--quick", help="The must-pass subset, which proves no more than E2.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Measure speed as well, which E5 takes.")] = False,
    end_to_end: Models = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes; 0 is what suits the device.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For one check.")] = 60.0,
    limit: Annotated[
        float | None,
        typer.Option("--limit", metavar="SECONDS", help="For all; what is not judged by then counts as a timeout."),
    ] = None,
    waivers: Annotated[
        Path | None, typer.Option("--waivers", metavar="FILE", help="Default: ci/expectations/VENDOR.toml.")
    ] = None,
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Judge every provider that may run on the device on its samples and invariants, and write a report package.

    Exits with 1 if something failed or a waiver is wrong, 2 if nothing could be judged, 3 after a crash or a hang.
    Ctrl-C and SIGTERM end it at once and leave nothing behind: 130 and 143.
    """
    from k3hal.conform import run as runner
    from k3hal.conform.pool import Limits
    from k3hal.conform.processes import Terminated, terminable
    from k3hal.conform.selection import Selection
    from k3hal.dispatch.registry import default_registry
    from k3hal.dispatch.words import nearest

    _refuse_odd(jobs, timeout, limit)
    known = default_registry().backends
    if backend is not None and backend not in known:
        raise UsageError(f"--backend: no backend is called {backend!r}", hint=nearest(backend, known))
    machine = present(device)
    selection = Selection.on(machine, backend, op, quick)
    limits = Limits(check=timeout, start=max(timeout, Limits().start))
    how = runner.How(jobs, limits, bench=bench, waivers=waivers or runner.expectations(machine.vendor))
    how = replace(how, end_to_end=end_to_end, limit=math.inf if limit is None else limit)
    try:
        with Bar() as note, terminable():
            report = runner.run(selection, out, how, note)
    except KeyboardInterrupt as stop:
        typer.echo("interrupted", err=True)
        return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED
    code = runner.exit_code(report)
    if as_json:
        print_json("k3hal.conform_run/1", _summary(report, out, code))
    else:
        _print(report, out)
    return code


def _refuse_odd(jobs: int, timeout: float, limit: float | None) -> None:
    if not 0 <= jobs <= MOST_JOBS:
        raise UsageError(f"--jobs is {jobs}", hint=f"from 0 to {MOST_JOBS}")
    if not 0 < timeout <= 86400:
        raise UsageError(f"--timeout is {timeout:g}", hint="above 0, at most 86400")
    if limit is not None and not limit > 0:
        raise UsageError(f"--limit is {limit:g}", hint="above 0")


class Bar:
    """A bar on the error stream, where that is a terminal."""

    def __enter__(self) -> Callable[[int, int, str], None]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        task = self._bar.add_task("starting", total=None)
        self._bar.start()

        def note(done: int, total: int, op: str) -> None:
            self._bar.update(task, completed=done, total=total, description=op)

        return note

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _summary(report: dict[str, Any], out: Path, code: int) -> dict[str, Any]:
    keys = ("statement", "device", "selection", "must_pass", "counts", "seconds", "unmeasured")
    names = ("op", "provider", "backend", "level", "reference_only")
    failures = [check for check in report["checks"] if check["status"] in ("Fail", "Crash", "Timeout")]
    ends = [{k: v for k, v in one.items() if k != "ran"} for one in report["end_to_end"]]
    return {
        "package": str(out),
        "exit_code": code,
        **{key: report[key] for key in keys},
        "providers": [{name: one[name] for name in names} for one in report["providers"]],
        "failures": failures,
        "end_to_end": ends,
        "waivers": report["waivers"],
    }


def _print(report: dict[str, Any], out: Path) -> None:
    from k3hal.conform.statement import run_name

    backend, missing = report["selection"]["backend"], 0
    for one in report["providers"]:
        passed, of = (sum(row[key] for row in one["levels"]) for key in ("passed", "of"))
        if one["reference_only"]:
            if backend:
                missing += 1
                continue
            typer.echo(f"{one['op']:<20} {'reference':<24} {one['level']}  nothing else runs it here")
        elif one["levels"]:
            typer.echo(f"{one['op']:<20} {one['provider']:<24} {one['level']}  {passed}/{of}")
    if missing:
        typer.echo(f"operators without a provider of {backend} that runs here: {missing}")
    for check in report["checks"]:
        if check["status"] in ("Fail", "Crash", "Timeout"):
            why = [*check["problems"], *(f"{t['name']}: {t['problem']}" for t in check["tensors"] if t["problem"])]
            kind = "" if check["kind"] == "sample" else f" [{check['kind'].partition(':')[2]}]"
            typer.echo(f"{check['status']}: {check['provider']}, {check['case']}{kind}: {'; '.join(why)}")
    for one in report["end_to_end"]:
        typer.echo(f"end to end, {run_name(one)}: {one['status']} {one['problem']}".rstrip())
    if report["unmeasured"]:
        typer.echo(f"not all was timed: {report['unmeasured']}")
    for waiver in report["waivers"]:
        if waiver["problem"]:
            typer.echo(f"waiver {waiver['id']} of {waiver['op']}: {waiver['problem']}")
    numbers = ", ".join(f"{number} {status}" for status, number in report["counts"].items()) or "nothing"
    typer.echo(f"{numbers} in {report['seconds']:.0f} s; package {out}")


@app.command()
def verify(package: Package, as_json: Json = False) -> int:
    """Say whether a package can be trusted: complete, unaltered, of a clean tree and of this k3hal's list and policy.

    Exits with 1 and every reason, a line each, where it cannot.
    """
    from k3hal.conform.verify import notes as notes_of
    from k3hal.conform.verify import verify as reasons_of

    reasons, notes = reasons_of(package), notes_of(package)
    if as_json:
        said = {"package": str(package), "verified": not reasons, "reasons": reasons, "notes": notes}
        print_json("k3hal.conform_verify/1", said)
    else:
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        for reason in reasons:
            typer.echo(f"rejected: {reason}")
        if not reasons:
            typer.echo(f"verified: {package}")
    return 1 if reasons else 0


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="The earlier package, or another machine's.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The later package.")],
    as_json: Json = False,
) -> int:
    """Show what changed from package A to B: levels, statuses, and numbers that moved by more than twice.

    Across machines, each operator's best providers are compared. Exits with 1 if B lost anything.
    """
    from k3hal.conform.diff import compare_reports
    from k3hal.conform.package import read_report

    changes = compare_reports(read_report(a), read_report(b))
    lost = sum(change.lost for change in changes)
    if as_json:
        print_json("k3hal.conform_diff/1", {"lost": lost, "changes": [change.to_json() for change in changes]})
    else:
        for change in changes:
            typer.echo(str(change))
        typer.echo(f"{len(changes)} changes, {lost} lost")
    return 1 if lost else 0


@app.command()
def html(
    package: Package,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page; default: index.html in the package.")
    ] = None,
) -> None:
    """Make one self-contained page of a package: levels, numbers, failures, versions."""
    from k3hal.conform.page import write_page

    target = out or package / "index.html"
    write_page(package, target)
    typer.echo(str(target))


app.command()(selftest)
app.command()(contracts)
app.command()(cross_compile)
