"""Keeps the call of a failed check as a case file, as small as it gets while it still fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from k3hal.conform.result import INVARIANT, SAMPLE
from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.check import check
from k3hal.debug.invariants import check_invariant
from k3hal.debug.shrink import shrink
from k3hal.debug.target import Target

LARGEST = 64 << 20
"""Bytes of a case that is still kept; a larger one is made anew from its sample's name."""
SECONDS = 20.0
"""To spend on making one case smaller."""


def case_name(case: Case, provider: str, kind: str) -> str:
    """A file name that says which check of whom."""
    words = [case.id, provider, *([] if kind == SAMPLE else [kind.removeprefix(INVARIANT)])]
    return "-".join(words).replace("/", "_")[:150] + ".k3case"


def keep_case(case: Case, provider: str, kind: str, folder: Path) -> Path | None:
    """Write the case as it is; None where it is too large."""
    if case.nbytes > LARGEST:
        return None
    return save_case(case, folder / case_name(case, provider, kind))


def fails(target: Target, kind: str) -> Callable[[Case], bool]:
    """Whether a variant of a case fails in the same kind of check."""

    def ask(case: Case) -> bool:
        if kind == SAMPLE:
            return check(case, target).status == "Fail"
        verdict = check_invariant(kind.removeprefix(INVARIANT), case, target)
        return verdict is not None and verdict.status == "Fail"

    return ask


def shrink_case(case: Case, ask: Callable[[Case], bool], path: Path) -> None:
    """Replace the file by a smaller case that fails too, if one is found in time; whole or not at all."""
    deadline = time.monotonic() + SECONDS
    small = shrink(case, lambda candidate: time.monotonic() < deadline and ask(candidate))
    if small is not case:
        aside = path.with_suffix(".partial")
        save_case(small, aside)
        os.replace(aside, path)
