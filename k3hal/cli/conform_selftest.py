"""`k3hal conform selftest`: plants every seeded fault and says which check found it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json

if TYPE_CHECKING:
    from k3hal.conform.selftest import Outcome, SelfTest


def selftest(
    fault: Annotated[str, typer.Option("--fault", metavar="GLOB", help="Only faults of this NAME or OP.NAME.")] = "*",
    full: Annotated[
        bool, typer.Option("--full", help="Check the right providers on everything, not only on what found a fault.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Plant every fault of the catalogue in a right provider and see that the checks of `conform run` find it.

    Exits with 1 if one is not found, is found in another operator, or if a right provider fails a check.
    """
    from k3hal.conform.selftest import SCHEMA, SelfTest, faults_matching

    test, outcomes = SelfTest(full), []
    for outcome in test.run(faults_matching(fault)):
        outcomes.append(outcome)
        if not as_json:
            typer.echo(_line(outcome))
    caught = sum(outcome.caught for outcome in outcomes)
    if as_json:
        rows = [outcome.to_json() for outcome in outcomes]
        alarms = [alarm.to_json() for alarm in test.false_alarms]
        print_json(SCHEMA, {"caught": caught, "of": len(outcomes), "faults": rows, "false_alarms": alarms})
    else:
        _print_alarms(test)
        typer.echo(f"caught {caught} of {len(outcomes)} seeded faults")
    return 0 if caught == len(outcomes) and not test.false_alarms else 1


def _line(outcome: Outcome) -> str:
    name = f"{outcome.fault.op:<18} {outcome.fault.name:<42}"
    if outcome.found is None:
        return f"{name} NOT CAUGHT by {outcome.checks} checks: {outcome.fault.bug}"
    kind = f" [{outcome.found.invariant}]" if outcome.found.invariant else ""
    case = outcome.found.case.removeprefix(f"{outcome.fault.op}-")
    return f"{name} {case + kind:<34} {outcome.found.reasons[0]}"


def _print_alarms(test: SelfTest) -> None:
    for alarm in test.false_alarms:
        typer.echo(f"false alarm: {alarm.provider}, {alarm.case} {alarm.kind}: {'; '.join(alarm.reasons)}")
