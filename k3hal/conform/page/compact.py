"""The data inside the page: the report with its checks as rows of indices into one table of strings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from k3hal.conform.result import BAD, CheckResult
from k3hal.dispatch.registry import get_operator, operator_names

# The columns of a row, read by `data.js` in this order.
TEXTS = ("op", "provider", "dtype", "shape_class", "phase", "kind", "status", "case", "case_file", "waiver")


def page_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a report.

    `rows`: for each check the indices of `TEXTS`, its seconds, problems, tensors (name, tolerance, status, tensor,
    slice, peak, peer, problem) and the commands that reproduce it; every text is an index into `strings`. Measured
    numbers keep six digits.
    """
    strings = _Strings()
    device = report["selection"]["device"]
    rows = [_row(check, device, strings) for check in report["checks"]]
    ops = {provider["op"] for provider in report["providers"]} | {check.op for check in report["checks"]}
    rest = {key: value for key, value in report.items() if key != "checks"}
    return {**rest, "families": _families(ops), "texts": TEXTS, "rows": rows, "strings": list(strings.index)}


class _Strings:
    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def of(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))


def _row(check: CheckResult, device: str, strings: _Strings) -> list[Any]:
    tensors = [
        [
            *(strings.of(text) for text in (tensor.name, tensor.tolerance, tensor.status)),
            *(_short(number) for number in (tensor.tensor, tensor.slice, tensor.peak, tensor.peer)),
            strings.of(tensor.problem),
        ]
        for tensor in check.tensors
    ]
    problems = [strings.of(problem) for problem in check.problems]
    commands = [strings.of(command) for command in commands_of(check, device)]
    return [*(strings.of(getattr(check, key)) for key in TEXTS), _short(check.seconds), problems, tensors, commands]


def _short(value: float | None) -> float | None:
    """Six digits: more than any cap has, and half the page. None for what is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def commands_of(check: CheckResult, device: str) -> list[str]:
    """What reproduces a failure: its case replayed in the package's folder, or its sample where no case was kept."""
    if check.status not in BAD and not check.case_file:
        return []
    who = ["--provider", check.provider]
    where = ["--device", device] if device not in ("", "auto") else []
    if not check.case_file:
        name = check.case.removeprefix(f"{check.op}-").removesuffix(f"-{check.dtype}")
        how = ["--invariant", check.invariant] if check.invariant else ["--isolate"]
        sample = ["--sample", name, "--dtype", check.dtype]
        return [shlex.join(["k3hal", "op", "compare", check.op, *who, *sample, *how, *where])]
    commands = [["k3hal", "op", "replay", check.case_file, *who, *where]]
    if check.invariant:
        case = ["--case", check.case_file, "--invariant", check.invariant]
        commands.append(["k3hal", "op", "compare", check.op, *who, *case, *where])
    return [shlex.join(command) for command in commands]


def _families(ops: Iterable[str]) -> dict[str, list[str]]:
    """Operators by family, both in order of name; those that this version does not know come last, as `other`."""
    known = set(operator_names())
    found: dict[str, list[str]] = {}
    for op in sorted(ops):
        found.setdefault(get_operator(op).family if op in known else "other", []).append(op)
    return dict(sorted(found.items(), key=lambda item: (item[0] == "other", item[0])))
