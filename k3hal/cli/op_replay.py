"""`k3hal op replay`: recorded or saved cases, judged here, whatever machine they come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_cases import PresentDevice, present, print_verdict
from k3hal.cli.output import print_json

if TYPE_CHECKING:
    from k3hal.debug.case import Case
    from k3hal.debug.verdict import Verdict


def replay(
    cases: Annotated[list[Path], typer.Argument(metavar="CASE", help="Files that compare, dump or bisect wrote.")],
    provider: Annotated[
        str, typer.Option("--provider", metavar="P", help="An id, name or backend; reference, composed, current.")
    ] = "current",
    isolate: Annotated[bool, typer.Option("--isolate", help="Run every case in a child process.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For a case under --isolate.")] = 60.0,
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Run cases with a provider of this machine and judge them; what was recorded is judged beside it.

    Exits with 1 if the provider that runs here fails a case, 2 if nothing ran, 3 on a crash or a hang.
    """
    from k3hal.debug.case_file import load_case
    from k3hal.debug.compare import How, compare_all
    from k3hal.debug.verdict import exit_code

    how = How(present(device), isolate=isolate, timeout=timeout)
    loaded = [load_case(path) for path in cases]
    verdicts, rows = [], []
    for path, (case, verdict) in zip(cases, compare_all(loaded, [provider], how), strict=True):
        recorded = _recorded(case)
        verdicts.append(verdict)
        rows.append(
            {
                "file": str(path),
                **verdict.to_json(),
                "origin": dict(case.origin),
                "recorded": recorded.to_json() if recorded else None,
            }
        )
        if not as_json:
            _print(path, case, verdict, recorded)
    if as_json:
        print_json("k3hal.op_replay/1", {"device": how.device.id, "results": rows})
    return exit_code([verdict.status for verdict in verdicts])


def _recorded(case: Case) -> Verdict | None:
    """What the provider gave where the case was recorded, judged by the golden made here."""
    if not case.recorded:
        return None
    from k3hal.debug.golden import Golden, golden
    from k3hal.debug.judge import judge
    from k3hal.debug.verdict import Verdict, worst
    from k3hal.dispatch.registry import get_operator

    operator = get_operator(case.op)
    expected = golden(operator, case.args)
    known = Golden({n: v for n, v in expected.items() if n in case.recorded}, expected.dtypes)
    tensors = judge(operator, case.args, case.recorded, known)
    provider = f"{case.origin.get('provider', 'unknown')} (recorded)"
    return Verdict(case.op, provider, case.id, worst([t.status for t in tensors]), (), tensors)


def _print(path: Path, case: Case, verdict: Verdict, recorded: Verdict | None) -> None:
    origin: dict[str, Any] = {k: v for k, v in case.origin.items() if isinstance(v, str | int | float) and v != ""}
    typer.echo(f"{path}" + "".join(f"  {key} {value}" for key, value in origin.items()))
    if recorded:
        print_verdict(recorded)
    print_verdict(verdict)
