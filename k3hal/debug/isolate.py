"""Checks a case in a child process, so that a crash or a hang is a result and not the end of the sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.verdict import Verdict

CHILD = "k3hal.debug.child"


@dataclass(frozen=True, slots=True)
class Job:
    """What a child checks: the case in a file, with a provider on a device, against the golden or another provider.

    `plugins` are backend modules to register first, besides those every process finds.
    """

    case: str
    provider: str
    device: str = "cpu"
    against: str = "reference"
    repeat: bool = True
    plugins: tuple[str, ...] = ()


def check_isolated(
    case: Case,
    provider: str,
    *,
    device: str = "cpu",
    against: str = "reference",
    repeat: bool = True,
    timeout: float = 60.0,
    plugins: tuple[str, ...] = (),
) -> Verdict:
    """As `check` of the provider called `provider`, in a process of its own that may take `timeout` seconds.

    Timeout counts from the child's start, which loads torch. A child that ends without a verdict is a Crash.
    """
    with tempfile.TemporaryDirectory(prefix="k3hal-case-") as folder:
        path, result = Path(folder) / "call.k3case", Path(folder) / "verdict.json"
        save_case(case, path)
        job = Job(str(path), provider, device, against, repeat, plugins)
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", CHILD, str(result)]
        try:
            done = subprocess.run(
                command, input=json.dumps(asdict(job)), capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return Verdict(case.op, provider, case.id, "Timeout", (f"did not end within {timeout:g} s",))
        if result.exists():
            return Verdict.from_json(json.loads(result.read_text("utf-8")))
        return Verdict(case.op, provider, case.id, "Crash", (_how_it_ended(done),))


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name if -done.returncode in set(signal.Signals) else ""
        ended = f"killed by {name or f'signal {-done.returncode}'}"
    else:
        ended = f"ended with code {done.returncode}"
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return f"{ended}: {last[0]}" if last[0] else ended


def publish(verdict: Verdict, path: Path) -> None:
    """Write a verdict so that it is there whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(verdict.to_json()), "utf-8")
    os.replace(partial, path)
