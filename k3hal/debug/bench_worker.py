"""The process that `bench_run` starts: a job as JSON on standard input, JSON lines on standard output."""

from __future__ import annotations

import json
import os
import sys

from k3hal.debug.bench_run import BenchJob, run_job


def main() -> None:
    """Run the job. What anything else prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_job(BenchJob.from_json(json.load(sys.stdin)), lambda said: print(json.dumps(said), file=replies, flush=True))


if __name__ == "__main__":
    main()
