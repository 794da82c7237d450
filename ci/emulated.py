"""Runs conformance of a machine that is not here over emulators of its vendor's libraries, on this machine's CPU.

    python ci/emulated.py mi355x --out DIR [--op GLOB] [--all] [--jobs N]

Triton's kernels are interpreted, and told that they run on the machine; the libraries are restated in torch
(tests/emulators). The package in DIR is as that of `k3hal conform run` and says that it is emulated: it proves E2 at
most. Without --all only the quick subset is judged. Exits as `k3hal conform run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

EMULATORS = Path(__file__).resolve().parents[1] / "tests" / "emulators"
PLUGIN = "emulated_"
MOST_JOBS = 64
PATIENCE = 900.0
"""Seconds for one check: an interpreted kernel takes 4 ms a program."""


def machines() -> list[str]:
    """Those that emulators are here of."""
    return sorted(path.stem.removeprefix(PLUGIN) for path in EMULATORS.glob(f"{PLUGIN}*.py"))


def main(words: list[str]) -> int:
    try:
        given = _parser().parse_args(words)
    except argparse.ArgumentError as error:
        print(f"emulated: {error}", file=sys.stderr)
        return 4
    # Processes of their own judge, which have to find the emulators and start as interpreters of Triton.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(EMULATORS), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(EMULATORS))
    return _judged(given.machine, given.out, given.op, not given.all, given.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ci/emulated.py", description="Conformance over emulators, on a CPU.", exit_on_error=False)
    parser.add_argument("machine", choices=machines())
    parser.add_argument("--out", type=Path, required=True, help="the package's folder; an earlier one is replaced")
    parser.add_argument("--op", default="*", help="a glob: only these operators")
    parser.add_argument("--all", action="store_true", help="every sample, not the quick subset")
    parser.add_argument("--jobs", type=processes, default=0, help="processes; 0 is what suits this machine")
    return parser


class _Parser(argparse.ArgumentParser):
    """Leaves every mistake to who called: `exit_on_error` covers some of them only."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def processes(text: str) -> int:
    number = int(text)
    if not 0 <= number <= MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{number} is not from 0 to {MOST_JOBS}")
    return number


def _judged(machine: str, out: Path, op: str, quick: bool, jobs: int) -> int:
    from k3hal.conform import run
    from k3hal.conform.pool import Limits
    from k3hal.conform.processes import Terminated, terminable
    from k3hal.conform.selection import Selection, registry_with
    from k3hal.dispatch.emulated import PREFIX, emulated_machine
    from k3hal.errors import K3HALError

    plugins = (f"{PLUGIN}{machine}",)
    try:
        registry_with(plugins)
        selection = Selection.on(emulated_machine(f"{PREFIX}{machine}"), None, op, quick)
        how = run.How(jobs, Limits(check=PATIENCE, start=PATIENCE), plugins=plugins)
        with terminable():
            report = run.run(selection, out, how, lambda done, total, op: None)
    except K3HALError as error:
        print(f"emulated: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print("emulated: interrupted", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130
    for check in report["checks"]:
        if check["status"] in ("Fail", "Crash", "Timeout"):
            why = [*check["problems"], *(t["problem"] for t in check["tensors"] if t["problem"])]
            print(f"{check['status']}: {check['provider']}, {check['case']} {check['kind']}: {'; '.join(why)}")
    counts = ", ".join(f"{number} {status}" for status, number in report["counts"].items())
    print(f"{report['device']['arch']}, emulated: {counts or 'nothing'} in {report['seconds']:.0f} s; {out}")
    return run.exit_code(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
