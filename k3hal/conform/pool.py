"""Runs tasks in child processes and turns what kills or hangs one into a result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.conform.failures import keep_case
from k3hal.conform.processes import Processes
from k3hal.conform.result import CheckResult, ResultStatus
from k3hal.conform.suite import Check
from k3hal.conform.worker import Task
from k3hal.errors import BackendError

MODULE = "k3hal.conform.worker"
MOST_DEATHS = 3
"""After so many crashes or hangs of one provider of an operator, its other checks are not tried."""
FULL_SIZE = ("k3", "device")
"""Classes of shapes whose golden may be too much for a host."""
PREPARING = 10
"""How many times longer a case and its golden may take than a check."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for one check, and for a process to start."""

    check: float = 60.0
    start: float = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task gave: results, and by provider the keys of invariants that do not apply."""

    results: list[CheckResult]
    skipped: dict[str, list[str]]


Note = Callable[[int], None]
"""Told how many more checks are done."""


class Child:
    """A worker process: tasks go in, events come out."""

    def __init__(self, processes: Processes) -> None:
        processes.refuse_when_stopped()
        self._read, write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", MODULE, str(write)]
        self._process = processes.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, pass_fds=(write,)
        )
        os.close(write)
        self._buffer = b""

    def send(self, task: Task) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has died is noticed by its missing events
            self._process.stdin.write(json.dumps(task.to_json()).encode() + b"\n")
            self._process.stdin.flush()

    def event(self, timeout: float) -> dict[str, Any] | None:
        """The next event; None at the end of the process. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError
            data = os.read(self._read, 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def ended(self) -> str:
        """How the process ended, in words."""
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"the process was killed by {name}" + (f": {last[0]}" if last[0] else "")
        return f"the process ended with code {code}" + (f": {last[0]}" if last[0] else "")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        os.close(self._read)
        self._errors.close()


class Deaths:
    """How each provider of an operator has ended its processes, whichever lane it was in."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[ResultStatus]] = {}
        self._lock = threading.Lock()

    def add(self, op: str, provider: str, status: ResultStatus) -> None:
        with self._lock:
            self._known.setdefault((op, provider), []).append(status)

    def last_of_many(self, op: str, provider: str) -> ResultStatus | None:
        """How the provider's last process ended, once there are `MOST_DEATHS`."""
        with self._lock:
            known = self._known.get((op, provider), [])
            return known[-1] if len(known) >= MOST_DEATHS else None


class Lane:
    """One process at a time, and the tasks given to it one after another. Close it when done.

    What is not judged by `until` (of the monotonic clock) counts as a timeout. Lanes of one run share `processes` and
    `deaths`.
    """

    def __init__(
        self,
        limits: Limits,
        until: float = math.inf,
        processes: Processes | None = None,
        deaths: Deaths | None = None,
    ) -> None:
        self._processes, self._deaths = processes or Processes(), deaths or Deaths()
        self._limits, self._until, self._child, self._fresh = limits, until, None, True

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def run(self, task: Task, note: Note) -> Outcome:
        """All results of a task, whatever its providers do to the process.

        Raises `BackendError` when the operator's own samples or reference fail, `Stopped` when the run was.
        """
        progress = _Progress(task, note, self._deaths)
        while True:
            progress.give_up_the_deadly()
            if time.monotonic() >= self._until:
                self._drop()
                progress.give_up("not judged: the time of the whole run was over")
                return Outcome(progress.results, progress.skipped)
            child = self._started()
            child.send(progress.rest())
            ended = self._follow(child, progress)
            if ended is None:
                return Outcome(progress.results, progress.skipped)
            self._drop()
            self._processes.refuse_when_stopped()
            if ended:
                progress.died(*ended)

    def _started(self) -> Child:
        if self._child is None:
            self._child, self._fresh = Child(self._processes), True
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _follow(self, child: Child, progress: _Progress) -> tuple[ResultStatus, str] | tuple[()] | None:
        """Take events until the task ends (None), the device is spent (nothing), or the process dies or hangs."""
        timeout = self._limits.start if self._fresh else self._limits.check
        while True:
            try:
                event = child.event(min(timeout, max(self._until - time.monotonic(), 0.0)))
            except TimeoutError:
                if time.monotonic() >= self._until:
                    return ()
                return "Timeout", f"did not end within {timeout:g} s"
            if event is None:
                return () if progress.at_rest else ("Crash", child.ended())
            if event["event"] == "end":
                return None
            if event["event"] == "broken":
                raise BackendError(f"conformance of {progress.task.op} cannot be judged: {event['message']}")
            progress.take(event)
            self._fresh = False
            timeout = self._limits.check * (PREPARING if event["event"] == "prepare" else 1)


class _Progress:
    """What is known of a task so far."""

    def __init__(self, task: Task, note: Note, deaths: Deaths) -> None:
        self.task, self._note, self._deaths = task, note, deaths
        self.results: list[CheckResult] = []
        self.skipped: dict[str, list[str]] = {one.provider: [] for one in task.candidates}
        self._done: dict[str, list[str]] = {one.provider: [] for one in task.candidates}
        self._now: tuple[str, str] | None = None
        self._shrinking = False
        self._key = ""
        self._checks = {check.key: check for check in task.checks()}

    @property
    def at_rest(self) -> bool:
        """Whether the process ended between two checks, which it does when its device is spent."""
        return self._now is None and not self._shrinking and bool(self.results)

    def rest(self) -> Task:
        return dataclasses.replace(self.task, done=self._done)

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        self._shrinking = kind == "shrink"
        if kind == "prepare":
            self._now, self._key = None, event["key"]
        elif kind == "begin":
            self._now = (event["provider"], event["key"])
        elif kind == "skip":
            self._finish(event["provider"], event["key"])
            self.skipped[event["provider"]].append(event["key"])
        elif kind == "result":
            result = CheckResult.from_json(event["result"])
            case_file = f"cases/{event['case_file']}" if event["case_file"] else ""
            self.results.append(dataclasses.replace(result, case_file=case_file))
            self._finish(result.provider, event["key"])

    def _finish(self, provider: str, key: str) -> None:
        self._done[provider].append(key)
        self._now = None
        self._note(1)

    def died(self, status: ResultStatus, how: str) -> None:
        """The process did: the check it was in has its result, unless it was only making a case smaller."""
        if self._shrinking:
            self._shrinking = False
            return
        if self._now is None:
            if self._key and self._checks[self._key].shape_class in FULL_SIZE:
                self._pass_over(self._checks[self._key].case_id, status, how)
                return
            raise BackendError(f"conformance of {self.task.op} cannot be judged: {how}, while preparing {self._key}")
        provider, key = self._now
        self._record(provider, self._checks[key], status, how, keep=True)
        self._deaths.add(self.task.op, provider, status)

    def give_up_the_deadly(self) -> None:
        """No more checks of a provider that has ended too many processes."""
        why = f"not tried: the provider crashed or hung {MOST_DEATHS} times before"
        for provider in self._done:
            if status := self._deaths.last_of_many(self.task.op, provider):
                for check in list(self._remaining(provider)):
                    self._record(provider, check, status, why, keep=False)

    def _pass_over(self, case_id: str, status: ResultStatus, how: str) -> None:
        """A case whose golden this machine cannot make proves nothing for anyone; the others are still judged."""
        for one in self.task.candidates:
            for check in [check for check in self._remaining(one.provider) if check.case_id == case_id]:
                self._record(one.provider, check, status, f"the case and its golden: {how}", keep=False)

    def give_up(self, why: str) -> None:
        """All that is left has no other result."""
        for one in self.task.candidates:
            for check in list(self._remaining(one.provider)):
                self._record(one.provider, check, "Timeout", why, keep=False)

    def _remaining(self, provider: str) -> Iterator[Check]:
        refused = next(one.refused for one in self.task.candidates if one.provider == provider)
        for key, check in self._checks.items():
            if key not in self._done[provider] and check.case_id not in refused:
                yield check

    def _record(self, provider: str, check: Check, status: ResultStatus, why: str, *, keep: bool) -> None:
        case_file = ""
        if keep:
            path = keep_case(check.case(), provider, check.kind, Path(self.task.folder))
            case_file = f"cases/{path.name}" if path else ""
        result = check.result(provider)
        self.results.append(
            dataclasses.replace(result, status=status, problems=(why,), case_file=case_file)
        )  # fmt: skip
        self._finish(provider, check.key)
