"""Reads a package's report for the page, and checks what only the page reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3hal.conform.package import REPORT, read_report
from k3hal.conform.result import CheckResult
from k3hal.errors import InputError

_TEXT, _LIST, _NUMBER = str, list, (int, float)
_OPTIONAL = (int, float, type(None))
_LEVEL = {"dtype": _TEXT, "shape_class": _TEXT, "level": _TEXT, "passed": int, "of": int, "worst": dict}
_REFUSAL = {"dtype": _TEXT, "phase": _TEXT, "reasons": _LIST, "cases": _LIST}
_CLASS = dict.fromkeys(("floor", "tensor", "slice", "peak"), _OPTIONAL) | {"exact": bool}
_TENSOR: Mapping[str, Any] = {
    **dict.fromkeys(("name", "tolerance", "status", "problem"), _TEXT),
    **dict.fromkeys(("tensor", "slice", "peak"), _NUMBER),
    "peer": _OPTIONAL,
}


def load_report(package_dir: Path) -> dict[str, Any]:
    """The report of a package, `checks` as `CheckResult`s. Raises `InputError`, one line, for what cannot be shown."""
    report = read_report(package_dir)
    where = str(package_dir / REPORT)
    for name, tolerance in report["policy"]["classes"].items():
        _check(f"{where}: policy.classes {name!r}", tolerance, _CLASS)
    for number, provider in enumerate(report["providers"]):
        for part, kinds in (("levels", _LEVEL), ("refusals", _REFUSAL)):
            for row in provider[part]:
                _check(f"{where}: providers {number}: {part}", row, kinds)
    for number, check in enumerate(report["checks"]):
        _check_result(f"{where}: checks {number}", check)
    return report


def _check_result(where: str, check: CheckResult) -> None:
    for problem in check.problems:
        if not isinstance(problem, str):
            raise InputError(f"{where}: problems: {problem!r} is not a string")
    for tensor in check.tensors:
        _check(f"{where}: tensors", {key: getattr(tensor, key) for key in _TENSOR}, _TENSOR)


def _check(where: str, row: Any, kinds: Mapping[str, Any]) -> None:
    if not isinstance(row, dict):
        raise InputError(f"{where}: {type(row).__name__} where an object belongs")
    for key, kind in kinds.items():
        if key not in row:
            raise InputError(f"{where}: {key!r} is missing")
        # A bool is an int to Python and to nobody else.
        if not isinstance(row[key], kind) or (isinstance(row[key], bool) and kind is not bool):
            raise InputError(f"{where}: {key!r} is {type(row[key]).__name__}")
