"""The list of checks that a run of a selection must have a result for, and its hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from k3hal.conform.policy import digest
from k3hal.conform.selection import Selection


def must_pass(selection: Selection) -> dict[str, Any]:
    """`hash` and `count` of the installed k3hal's own list for a selection: every check of every operator in it.

    The list is derived from the samples themselves: adding, removing or renaming one changes the hash.
    """
    keys = sorted(selection.keys())
    return {"hash": digest(keys), "count": len(keys)}


def missing(
    selection: Selection, op: str, done: Iterable[str], not_applicable: Iterable[str], refused: Iterable[str]
) -> list[str]:
    """The keys of an operator's checks that a provider has neither a result for nor a reason to have none.

    `done` are keys with a result, `not_applicable` those of invariants a case gives nothing to try, `refused` the ids
    of cases the provider says No to: their invariants are not asked.
    """
    have, without, no = set(done), set(not_applicable), set(refused)
    out = []
    for check in selection.checks(op):
        excused = bool(check.kind != "sample" and (check.key in without or check.case_id in no))
        if check.key not in have and not excused:
            out.append(check.key)
    return out


def selection_of(report: Mapping[str, Any]) -> Selection:
    """The selection a report says it is of. Raises `TypeError` for fields that are none."""
    return Selection(**report["selection"])
