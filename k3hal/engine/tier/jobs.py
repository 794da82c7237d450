"""Work of the tier beside the scheduler: reading in some threads, writing in one, behind a bounded queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

logger = logging.getLogger(__name__)

_READERS = 4
_MOST_WRITES = 64
"""Objects that may wait to be written; while as many do, no other is stored."""


class Jobs(Protocol):
    """Runs what it is given, some time. Writes run one after the other, in the order they came."""

    @property
    def full(self) -> bool:
        """Whether the queue of writes takes no more."""
        ...

    def read(self, job: Callable[[], None]) -> None: ...

    def write(self, job: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """Run the writes that wait and nothing else, then end."""
        ...


class ThreadJobs:
    """`Jobs` in threads."""

    def __init__(self, most_writes: int = _MOST_WRITES) -> None:
        self._most_writes = most_writes
        self._lock = threading.Lock()
        self._waiting = 0
        self._readers = ThreadPoolExecutor(_READERS, "k3hal-tier-read")
        self._writer = ThreadPoolExecutor(1, "k3hal-tier-write")

    @property
    def full(self) -> bool:
        return self._waiting >= self._most_writes

    def read(self, job: Callable[[], None]) -> None:
        self._readers.submit(_logged, job)

    def write(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._waiting += 1
        self._writer.submit(self._write, job)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _write(self, job: Callable[[], None]) -> None:
        try:
            _logged(job)
        finally:
            with self._lock:
                self._waiting -= 1


def _logged(job: Callable[[], None]) -> None:
    """A job handles what it expects; anything else is a bug that must not vanish with its thread."""
    try:
        job()
    except Exception:
        logger.exception("the external prefix cache failed")
