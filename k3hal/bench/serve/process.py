"""A server of ours in a process of its own, and what a server's process uses."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import psutil

from k3hal.errors import UnsupportedError, UsageError

_ADDRESS = re.compile(r" on (http://\S+) \(ready")
_START_SECONDS = 900
_STOP_SECONDS = 60


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """`k3hal serve` with these flags on a free port: its URL and process id. Raises `UnsupportedError` if it fails."""
    command = [sys.executable, *_isolation(), "-m", "k3hal.cli", "serve", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        try:
            yield _wait_ready(process, out, err), process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _isolation() -> list[str]:
    """This interpreter's own choice about the current folder being on the path."""
    return ["-P"] if sys.flags.safe_path else []


def _wait_ready(process: subprocess.Popen[bytes], out, err) -> str:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        code = process.poll()
        match = _ADDRESS.search(_content(out))
        if match:
            return match.group(1)
        if code is not None:
            lines = _content(err).strip().splitlines()
            reason = lines[-1].removeprefix("k3hal: error: ") if lines else f"exit code {code}"
            raise UnsupportedError(f"the server did not start: {reason}")
        time.sleep(0.05)
    raise UnsupportedError(f"the server was not ready after {_START_SECONDS} s")


def _content(file) -> str:
    file.seek(0)
    return file.read()


class ServerProcess:
    """Watches a process, not its children. Raises `UsageError` for an id that is not there."""

    def __init__(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise UsageError(f"--server-pid {pid}: no such process") from None
        self.pid = pid

    def cpu_seconds(self) -> float:
        """Processor time so far, user and system."""
        times = self._process.cpu_times()
        return times.user + times.system

    def memory(self) -> int:
        """Resident bytes."""
        return self._process.memory_info().rss
