"""The child processes of one run, all of which another thread can end at once."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):  # noqa: N818 - no error: the run was interrupted
    """The run is over, so that no process is started any more."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


class Processes:
    """Starts processes and knows those that have not ended; `stop` kills them and lets no more start."""

    def __init__(self) -> None:
        self._lock, self._live, self._stopped = threading.Lock(), set[subprocess.Popen[Any]](), False

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen`. Raises `Stopped` after `stop`."""
        with self._lock:
            self.refuse_when_stopped()
            process = subprocess.Popen(command, **options)
            self._live = {one for one in self._live if one.returncode is None} | {process}
            return process

    def run(self, command: Sequence[str], job: str, timeout: float) -> tuple[int, str]:
        """The exit code and the error stream of a process that reads `job`. Raises `subprocess.TimeoutExpired` after
        it was killed, and `Stopped` as `start` does."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with self.start(command, **pipes) as process:
            try:
                _, errors = process.communicate(job, timeout)
            finally:
                process.kill()  # nothing to one that has ended
        self.refuse_when_stopped()
        return process.returncode, errors

    def refuse_when_stopped(self) -> None:
        """Raise `Stopped` after `stop`: what a killed process leaves undone is no result."""
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._live:
                process.kill()


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the main thread while this lasts."""

    def end(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
