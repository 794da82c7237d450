"""Runs jobs one at a time, each in a process of its own with a time limit, forked from one that has loaded torch.

A fresh process for each job costs milliseconds so, not the seconds that loading torch takes, and nothing of one job is
left for the next: what it wrote into freed memory least of all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from k3hal.errors import BackendError

SERVER = "k3hal.debug.fork_server"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended and what it last reported (None: nothing); `why` is set unless it is Done."""

    status: Literal["Done", "Crash", "Timeout"]
    report: Any = None
    why: str = ""


class Forks:
    """The process that jobs are forked from, for the length of a `with` block.

    `plugins` are backend modules it registers besides those every process finds.
    """

    def __init__(self, plugins: tuple[str, ...] = ()) -> None:
        self._plugins = plugins
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str]
        self._errors: IO[str]
        self._server: subprocess.Popen[str]

    def __enter__(self) -> Forks:
        self._folder = tempfile.TemporaryDirectory(prefix="k3hal-jobs-")
        path = Path(self._folder.name) / "server.log"
        self._errors = path.open("w+", encoding="utf-8", errors="replace")
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", SERVER, *self._plugins]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        try:
            self._reply()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def run(self, job: str, timeout: float, **arguments: Any) -> Outcome:
        """Run the function `job` (`module:name`), as `job(report, **arguments)`, in a fork that may take `timeout` s.

        What it last gave to `report` (a JSON value) is kept also when it dies. Arguments are JSON values.
        """
        folder = Path(self._folder.name) / str(self._count)
        folder.mkdir()
        self._count += 1
        order = {"job": job, "timeout": timeout, "folder": str(folder), "arguments": arguments}
        assert self._server.stdin
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        code = self._reply()["code"]
        path = folder / "report.json"
        report = json.loads(path.read_text("utf-8")) if path.exists() else None
        if code == 0:
            return Outcome("Done", report)
        if code is None:
            return Outcome("Timeout", report, f"did not end within {timeout:g} s")
        return Outcome("Crash", report, _ended(code, (folder / "stderr.log").read_text("utf-8", "replace")))

    def _reply(self) -> Any:
        assert self._server.stdout
        line = self._server.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise BackendError(f"the process that runs jobs {_ended(self._server.wait(), self._errors.read())}")
        return json.loads(line)


def _ended(code: int, errors: str) -> str:
    if code < 0:
        ended = f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
    else:
        ended = f"ended with code {code}"
    last = (errors.strip().splitlines() or [""])[-1]
    return f"{ended}: {last}" if last else ended
