"""Measured speed of the judged providers, which evidence level E5 asks for: always of an output that was verified."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3hal.conform.result import SAMPLE
from k3hal.conform.selection import Selection, registry_with
from k3hal.conform.suite import Check
from k3hal.debug.bench import CaseBench
from k3hal.debug.ceilings import Ceilings, measure_ceilings
from k3hal.dispatch.probe import probe
from k3hal.errors import UnsupportedError

BUDGET = 0.2
"""Seconds for one timing."""
TIMEOUT = 3600.0


def measured_checks(checks: Sequence[Check]) -> list[Check]:
    """Of each dtype the check to measure on: of the largest class there is, the case with the most bytes."""
    best: dict[str, tuple[tuple[int, int], Check]] = {}
    for check in checks:
        if check.kind != SAMPLE:
            continue
        size = (check.shape_class in ("k3", "device"), check.case().nbytes)
        if check.sample.dtype not in best or size > best[check.sample.dtype][0]:
            best[check.sample.dtype] = (size, check)
    return [check for _, check in best.values()]


def measure_isolated(
    selection: Selection, providers: Mapping[str, Sequence[str]], plugins: Sequence[str], limit: float = math.inf
) -> list[dict[str, Any]]:
    """Timings of every provider of every operator named, in a child process. The reference stands beside them on a CPU,
    and beside one that is alone. After `limit` seconds no more cases are begun.

    Raises `UnsupportedError` when the process dies: what was judged right before has then no figures to go with it.
    """
    with tempfile.TemporaryDirectory(prefix="k3hal-conform-") as folder:
        result = Path(folder) / "timings.json"
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", __name__, str(result)]
        job = {"selection": asdict(selection), "providers": providers, "plugins": list(plugins), "limit": limit}
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        if not result.exists():
            last = next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")
            raise UnsupportedError(f"speed could not be measured: {last}", hint="run without --bench")
        return json.loads(result.read_text("utf-8"))


def main(job: Mapping[str, Any], result: Path) -> None:
    """Measure, and write the timings whole or not at all."""
    registry_with(job["plugins"])
    selection = Selection(**job["selection"])
    device, out, begun = probe(selection.device), [], time.monotonic()
    ceilings: dict[str, Ceilings] = {}
    for op, names in job["providers"].items():
        for check in measured_checks(selection.checks(op)):
            if time.monotonic() - begun > job["limit"]:
                break
            case = check.case()
            if case.dtype not in ceilings:
                ceilings[case.dtype] = measure_ceilings(device, case.dtype)
            bench = CaseBench(case, device, BUDGET)
            timings = [bench.timing(name, ceilings[case.dtype]) for name in names]
            if device.vendor == "cpu" or sum(timing.seconds is not None for timing in timings) == 1:
                timings.append(bench.timing("reference", ceilings[case.dtype]))
            for timing in timings:
                row = {"dtype": case.dtype, "flops": timing.flops, "bytes": timing.bytes, "spread": timing.spread}
                who = {"op": op, "provider": timing.verdict.provider, "case": case.id}
                out.append({**who, **row, "seconds": timing.seconds, "roofline": timing.roofline})
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(_with_peers(out)), "utf-8")
    os.replace(partial, result)


def _with_peers(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each timing with the fastest other one of the same case as its `peer`, None where there is none."""
    for row in timings:
        others = [t for t in timings if t["case"] == row["case"] and t is not row and t["seconds"]]
        best = min(others, key=lambda t: t["seconds"], default=None)
        row["peer"] = best and {"provider": best["provider"], "seconds": best["seconds"]}
    return timings


if __name__ == "__main__":
    main(json.load(sys.stdin), Path(sys.argv[1]))
