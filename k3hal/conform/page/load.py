"""Reads a package's `report.json` for the page, believing none of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from k3hal.conform.result import RESULT_STATUSES
from k3hal.errors import InputError

SCHEMA, MAJOR = "k3hal.conform", "1"
MAX_BYTES = 1 << 28
_NUMBER = (int, float)
_OPTIONAL = (int, float, type(None))

# What the page reads of each part of a report: key -> type(s). Further keys are left alone.
_PARTS: Mapping[str, Any] = {
    "statement": dict,
    "device": dict,
    "versions": dict,
    "env": dict,
    "selection": dict,
    "must_pass": dict,
    "policy": dict,
    "providers": list,
    "checks": list,
    "end_to_end": list,
    "waivers": list,
    "counts": dict,
    "seconds": _NUMBER,
}
_PROVIDER = {"op": str, "provider": str, "backend": str, "arch": str, "level": str, "levels": list, "refusals": list}
_LEVEL = {"dtype": str, "shape_class": str, "level": str, "passed": int, "of": int, "worst": (dict, type(None))}
_TEXTS = ("op", "provider", "dtype", "shape_class", "phase", "case", "kind", "status", "case_file", "waiver")
_CHECK = dict.fromkeys(_TEXTS, str) | {"seconds": _NUMBER, "problems": list, "tensors": list}
_TENSOR = {"name": str, "tolerance": str, "status": str, "problem": str} | dict.fromkeys(
    ("tensor", "slice", "peak", "peer"), _OPTIONAL
)
_CLASS = dict.fromkeys(("floor", "tensor", "slice", "peak"), _OPTIONAL) | {"exact": bool}


def load_report(package_dir: Path) -> dict[str, Any]:
    """The report of a package. Raises `InputError`, one line, for whatever the page could not show."""
    path = package_dir / "report.json"
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MAX_BYTES else ""
    except OSError as error:
        hint = "give the folder that `k3hal conform run --out` wrote"
        raise InputError(f"{path}: {error.strerror or error}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
    if size > MAX_BYTES:
        raise InputError(f"{path}: {size} bytes, at most {MAX_BYTES}")
    try:
        report = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_in_range)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    _Checker(path).report(report)
    return report


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number; what is not finite is null")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


def _in_range(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"{digits[:40]} is too large a number")
    return int(digits)


class _Checker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, where: str, what: str, hint: str = "") -> NoReturn:
        raise InputError(f"{self.path}: {where}: {what}" if where else f"{self.path}: {what}", hint=hint)

    def report(self, report: Any) -> None:
        self.object("", report, {"schema": str})
        name, _, version = report["schema"].partition("/")
        if name != SCHEMA or version.partition(".")[0] != MAJOR:
            self.fail("", f"schema is {report['schema']!r}", hint=f"this version reads {SCHEMA}/{MAJOR}")
        self.object("", report, _PARTS)
        self.object("policy", report["policy"], {"classes": dict})
        for name, tolerance in report["policy"]["classes"].items():
            self.object(f"policy.classes.{name}", tolerance, _CLASS)
        for i, provider in enumerate(report["providers"]):
            self.object(f"providers[{i}]", provider, _PROVIDER)
            for j, level in enumerate(provider["levels"]):
                self.object(f"providers[{i}].levels[{j}]", level, _LEVEL)
        for i, check in enumerate(report["checks"]):
            self.object(f"checks[{i}]", check, _CHECK)
            self.status(f"checks[{i}]", check)
            self.texts(f"checks[{i}].problems", check["problems"])
            for j, tensor in enumerate(check["tensors"]):
                self.object(f"checks[{i}].tensors[{j}]", tensor, _TENSOR)
                self.status(f"checks[{i}].tensors[{j}]", tensor)
        for part in ("end_to_end", "waivers"):
            for i, row in enumerate(report[part]):
                self.object(f"{part}[{i}]", row, {})

    def object(self, where: str, value: Any, keys: Mapping[str, Any]) -> None:
        if not isinstance(value, dict):
            self.fail(where, f"{_kind(value)} where an object belongs")
        for key, kind in keys.items():
            if key not in value:
                self.fail(where, f"no {key!r}")
            given = value[key]
            # A bool is an int to Python and to nobody else.
            if not isinstance(given, kind) or (isinstance(given, bool) and kind is not bool):
                self.fail(where, f"{key!r} is {_kind(given)}, not {_wanted(kind)}")

    def status(self, where: str, row: Mapping[str, Any]) -> None:
        if row["status"] not in RESULT_STATUSES:
            self.fail(where, f"status is {row['status']!r}", hint=f"one of {', '.join(RESULT_STATUSES)}")

    def texts(self, where: str, values: list[Any]) -> None:
        for value in values:
            if not isinstance(value, str):
                self.fail(where, f"{_kind(value)} where a string belongs")


_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
_KINDS |= {int: "a number", float: "a number"}


def _kind(value: Any) -> str:
    return _KINDS[type(value)]


def _wanted(kind: Any) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(dict.fromkeys(_KINDS[k] for k in kinds))
