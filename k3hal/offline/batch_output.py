"""The output of a batch: JSON lines that are only ever appended whole, so that a batch can go on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import orjson

from k3hal.errors import InputError

_START = b'{"id":"batch_req_'


class Recorded(NamedTuple):
    """What the file says about one id: whether it was answered, and to which request."""

    ok: bool
    digest: str | None


class BatchOutput:
    """An output file, locked against other batches while it is open. `recorded` maps ids to what is there already.

    A last line that a crash cut off is removed (`repaired`). Raises `InputError` for a file that is no batch's output,
    which is left as it is, and for one that cannot be written or is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired = False
        self.recorded: dict[str, Recorded] = {}
        self._fd = self._open()
        try:
            self._lock(self._fd)
            self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line with a single call, so that it is there whole or, after a crash, repaired away."""
        data = orjson.dumps(record) + b"\n"
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(0, f"only {written} of a line's {len(data)} bytes could be written")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from None
        self._note(record)

    def drop_failed(self) -> None:
        """Take the lines without an answer out, all at once or not at all."""
        if all(entry.ok for entry in self.recorded.values()):
            return
        target = self.path.resolve()
        try:
            with self.path.open("rb") as lines, tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as kept:
                kept.writelines(line for line in lines if json.loads(line)["response"] is not None)
                kept.flush()
                os.fsync(kept.fileno())
                os.chmod(kept.name, os.fstat(self._fd).st_mode & 0o777)
            os.replace(kept.name, target)
        except OSError as error:
            raise InputError(f"cannot rewrite {self.path}: {error.strerror or error}") from None
        old, self._fd = self._fd, self._open()
        self._lock(self._fd)
        os.close(old)
        self.recorded = {name: entry for name, entry in self.recorded.items() if entry.ok}

    def _open(self) -> int:
        if self.path.exists() and not self.path.is_file():
            raise InputError(
                f"{self.path} is not a regular file", hint="a batch reads its output back to go on with it"
            )
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from None

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(fd).st_ino == os.stat(self.path).st_ino
        except OSError:
            ours = False
        if not ours:
            raise InputError(f"{self.path} is in use by another batch", hint="wait for it, or name another --output")

    def _read(self) -> None:
        good, line = 0, b""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if _is_record(line):
                    self._note(json.loads(line))
                    good += len(line)
                elif line.endswith(b"\n") or line[: len(_START)] != _START[: len(line)]:
                    hint = "name another --output"
                    raise InputError(f"{self.path} line {number} is no line of a batch's output", hint=hint)
                else:
                    os.ftruncate(self._fd, good)
                    self.repaired = True
                    return
        if good and not line.endswith(b"\n"):
            os.write(self._fd, b"\n")

    def _note(self, record: Mapping[str, Any]) -> None:
        self.recorded[record["custom_id"]] = Recorded(record["response"] is not None, record.get("request"))


def _is_record(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get("custom_id"), str) and "response" in value
