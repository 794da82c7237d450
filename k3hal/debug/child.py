"""The process that `isolate` starts: `python -m k3hal.debug.child RESULT` with a job as JSON on standard input."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from k3hal.debug.case_file import load_case
from k3hal.debug.compare import compare_one
from k3hal.debug.isolate import Job, publish
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry


def run(job: Job, result: Path) -> None:
    """Check the job's case and write the verdict."""
    registry = default_registry()
    for module in job.plugins:
        registry.add_module(importlib.import_module(module))
    case = load_case(job.case)
    verdict = compare_one(case, job.provider, probe(job.device), against=job.against, repeat=job.repeat)
    publish(verdict, result)


if __name__ == "__main__":
    fields = json.load(sys.stdin)
    run(Job(**fields | {"plugins": tuple(fields["plugins"])}), Path(sys.argv[1]))
