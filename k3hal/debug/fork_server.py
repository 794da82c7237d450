"""The process that `forks` starts, with backend modules as arguments: orders on stdin, replies on stdout."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from k3hal.dispatch.registry import default_registry

_PRELOADED = ("k3hal.debug.tune_jobs", "k3hal.debug.run_case", "k3hal.debug.grid_runs")
_LOOK_EVERY = 0.004


def serve(plugins: list[str]) -> None:
    """Load what jobs need, say so, and fork for each order. A reply is the exit code, None after the time limit.

    Nothing but imports happens here: no thread and no device driver may be alive in a process that forks.
    """
    extra = [importlib.import_module(plugin) for plugin in plugins]
    registry = default_registry()
    for module in extra:
        registry.add_module(module)
    for name in _PRELOADED:
        importlib.import_module(name)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps({"code": _forked(json.loads(line))}), file=replies, flush=True)


def _forked(order: dict[str, Any]) -> int | None:
    child = os.fork()
    if child == 0:
        _run(order)
    deadline = time.monotonic() + order["timeout"]
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(_LOOK_EVERY)
    finally:
        if child:
            # It leads a group of its own, so that what it started goes as well; before it does, there is only it.
            os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return None


def _run(order: dict[str, Any]) -> NoReturn:
    """The job, in the fork. It ends without the clean-up that belongs to the process it was forked from."""
    folder, code = Path(order["folder"]), 70
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        errors = os.open(folder / "stderr.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(errors, 1)
        os.dup2(errors, 2)

        def report(value: Any) -> None:
            partial = folder / "report.partial"
            partial.write_text(json.dumps(value), "utf-8")
            os.replace(partial, folder / "report.json")

        module, _, name = order["job"].partition(":")
        getattr(importlib.import_module(module), name)(report, **order["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 - reported by the exit code and the last line of stderr
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
