"""Judges Triton providers under the interpreter, in one process for a whole list of checks; see `interpreter.py`.

Standard input is a JSON list of [operator, provider with or without tactic, sample, dtype, invariant or ""]; standard
output is the list of [status, reasons]. A file given as argument has `SPECIAL`, functions that return what they found
wrong; their results follow.
"""

from __future__ import annotations

import json
import runpy
import sys

from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.invariants import check_invariant
from k3hal.debug.target import find_target
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator


def judged(op: str, provider: str, name: str, dtype: str, invariant: str) -> tuple[str, tuple[str, ...]]:
    operator = get_operator(op)
    (sample,) = [s for s in samples_of(operator, tags=()) if (s.name, s.dtype) == (name, dtype)]
    case = sample_case(operator, sample, 0)
    target = find_target(case, provider, probe("cpu"))
    verdict = check_invariant(invariant, case, target) if invariant else check(case, target)
    return (verdict.status, verdict.reasons) if verdict else ("nothing to try", ())


if __name__ == "__main__":
    made = [judged(*one) for one in json.load(sys.stdin)]
    special = [run() for path in sys.argv[1:] for run in runpy.run_path(path)["SPECIAL"]]
    sys.stdout.write(json.dumps([*made, *(("Fail" if wrong else "Pass", wrong) for wrong in special)]))
