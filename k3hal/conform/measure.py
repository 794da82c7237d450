"""Measured speed of the judged providers, which evidence level E5 asks for: always of an output that was verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3hal.conform.processes import Processes
from k3hal.conform.result import SAMPLE
from k3hal.conform.selection import Selection, registry_with
from k3hal.conform.suite import Check
from k3hal.debug.bench import CaseBench
from k3hal.debug.ceilings import Ceilings, measure_ceilings
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.probe import probe

BUDGET = 0.2
"""Seconds for one timing."""
TIMEOUT = 3600.0


def measured_checks(checks: Sequence[Check]) -> list[Check]:
    """Of each dtype the check to measure on: of full-size cases that a host holds the one with the most bytes, else the
    first of those it does not, else the largest of all. The largest cases are not made only to be compared."""
    found: list[Check] = []
    for dtype in dict.fromkeys(check.sample.dtype for check in checks):
        mine = [check for check in checks if check.kind == SAMPLE and check.sample.dtype == dtype]
        full = [check for check in mine if check.shape_class == "k3"]
        larger = [check for check in mine if check.shape_class == "device"]
        found.append(larger[0] if larger and not full else max(full or mine, key=lambda check: check.case().nbytes))
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """What was timed, and why not all was (empty: it was)."""

    timings: list[dict[str, Any]]
    problem: str = ""


def measure_isolated(
    selection: Selection,
    providers: Mapping[str, Sequence[str]],
    plugins: Sequence[str],
    processes: Processes,
    limit: float = TIMEOUT,
) -> Measured:
    """Timings of every provider of every operator named, in a child process. The reference stands beside them on a CPU,
    and beside one that is alone. What was timed before the process dies, or before `limit` seconds, stays.

    Raises `Stopped` when the run was.
    """
    with tempfile.TemporaryDirectory(prefix="k3hal-conform-") as folder:
        result = Path(folder) / "timings.json"
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", __name__, str(result)]
        job = {"selection": asdict(selection), "providers": providers, "plugins": list(plugins)}
        try:
            code, errors = processes.run(command, json.dumps(job), min(max(limit, 0.0), TIMEOUT))
            problem = f"code {code}: {next(iter(errors.strip().splitlines()[-1:]), '')}" if code else ""
        except subprocess.TimeoutExpired:
            problem = "the time was over"
        if not result.exists():
            return Measured([], f"no speed was measured: {problem or 'nothing to measure'}")
        made = json.loads(result.read_text("utf-8"))
        said = f"speed was measured up to {made['now']}: {problem}" if problem else ""
        return Measured(_with_peers(made["timings"]), said)


def main(job: Mapping[str, Any], result: Path) -> None:
    """Measure one case after the other; the file always holds all timings so far, and the case in hand."""
    registry_with(job["plugins"])
    selection = Selection(**job["selection"])
    device, timings = probe(selection.device), []
    ceilings: dict[str, Ceilings] = {}

    def write(now: str) -> None:
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps({"timings": timings, "now": now}), "utf-8")
        os.replace(partial, result)

    for op, names in job["providers"].items():
        for check in measured_checks(selection.checks(op)):
            write(check.case_id)
            timings += _timings(check, names, device, ceilings)
    write("")


def _timings(
    check: Check, names: Sequence[str], device: DeviceDescription, ceilings: dict[str, Ceilings]
) -> Iterator[dict[str, Any]]:
    """Rows of one case, the ceilings of its dtype measured where they are not known yet."""
    case = check.case()
    if case.dtype not in ceilings:
        ceilings[case.dtype] = measure_ceilings(device, case.dtype)
    bench = CaseBench(case, device, BUDGET)
    rows = [bench.timing(name, ceilings[case.dtype]) for name in names]
    if device.vendor == "cpu" or sum(row.seconds is not None for row in rows) == 1:
        rows.append(bench.timing("reference", ceilings[case.dtype]))
    for row in rows:
        numbers = {"flops": row.flops, "bytes": row.bytes, "spread": row.spread, "seconds": row.seconds}
        who = {"op": case.op, "provider": row.verdict.provider, "case": case.id, "dtype": case.dtype}
        yield {**who, **numbers, "roofline": row.roofline}


def _with_peers(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each timing with the fastest other one of the same case as its `peer`, None where there is none."""
    for row in timings:
        others = [t for t in timings if t["case"] == row["case"] and t is not row and t["seconds"]]
        best = min(others, key=lambda t: t["seconds"], default=None)
        row["peer"] = best and {"provider": best["provider"], "seconds": best["seconds"]}
    return timings


if __name__ == "__main__":
    main(json.load(sys.stdin), Path(sys.argv[1]))
