"""A bar on standard error while the load runs: one short line, written twice a second."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from k3hal.bench.serve.client import Progress

_PERIOD = 0.5
_WIDTH = 30


@contextlib.asynccontextmanager
async def bar(progress: Progress) -> AsyncIterator[None]:
    """Show the bar on a terminal within the block.

    Not with rich: drawing takes it milliseconds in which nothing that arrives is noticed.
    """
    if not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_draw(progress, time.monotonic()))
    try:
        yield
    finally:
        task.cancel()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


async def _draw(progress: Progress, begun: float) -> None:
    while True:
        sys.stderr.write("\r" + line(progress, time.monotonic() - begun) + "\x1b[K")
        sys.stderr.flush()
        await asyncio.sleep(_PERIOD)


def line(progress: Progress, seconds: float) -> str:
    """The bar: answered, then running requests."""
    answered = _WIDTH * progress.done // progress.total
    sent = _WIDTH * progress.begun // progress.total
    drawn = "#" * answered + "-" * (sent - answered) + " " * (_WIDTH - sent)
    running = progress.begun - progress.done
    return f"[{drawn}] {progress.done} of {progress.total} answered, {running} running, {seconds:.0f} s"
