"""What changed between two packages: levels, statuses, and numbers that moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from k3hal.conform.result import RESULT_STATUSES, CheckResult
from k3hal.dispatch.evidence import LEVELS
from k3hal.dispatch.tolerance import CLASSES

MOVED = 2.0
"""Times by which a number must change to be worth a line."""
Report = Mapping[str, Any]
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `what` is `level`, `status` or `number`; `where` names it; `lost` says B is worse."""

    what: str
    where: str
    before: str
    after: str
    lost: bool

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("what", "where", "before", "after", "lost")}

    def __str__(self) -> str:
        mark = "-" if self.lost else "+" if self.what != "number" else "~"
        return f"{mark} {self.what:<6} {self.where}: {self.before} -> {self.after}"


def compare_reports(a: Report, b: Report) -> list[Change]:
    """The changes from A to B, what was lost first.

    Packages of one vendor and architecture are compared provider by provider. Across machines each operator is
    compared by its best provider, since providers differ there. What A has and B does not is lost.
    """
    same = all(a["device"][key] == b["device"][key] for key in ("vendor", "arch"))
    left, right = (_by_place(report, same) for report in (a, b))
    changes = [*_levels(left.levels, right.levels), *_checks(left.checks, right.checks)]
    return sorted(changes, key=lambda change: (not change.lost, change.what, change.where))


@dataclass(frozen=True, slots=True)
class _Side:
    levels: dict[Row, str]
    checks: dict[Row, CheckResult]


def _by_place(report: Report, same: bool) -> _Side:
    levels: dict[Row, str] = {}
    checks: dict[Row, CheckResult] = {}
    chosen = report["providers"] if same else _best(report["providers"])
    for one in chosen:
        name = (one["op"], one["provider"]) if same else (one["op"],)
        levels[name] = one["level"]
        for row in one["levels"]:
            levels[(*name, row["dtype"], row["shape_class"])] = row["level"]
        for check in report["checks"]:
            if (check.op, check.provider) == (one["op"], one["provider"]):
                kind = () if check.kind == "sample" else (check.kind,)
                checks[(*(() if same else ("best",)), *(name[1:] if same else ()), check.case, *kind)] = check
    return _Side(levels, checks)


def _best(providers: Iterable[Any]) -> list[Any]:
    """Of each operator the provider with the highest level, the first of equals."""
    best: dict[str, Any] = {}
    for one in providers:
        if one["op"] not in best or one["level"] > best[one["op"]]["level"]:
            best[one["op"]] = one
    return list(best.values())


def _levels(a: Mapping[Row, str], b: Mapping[Row, str]) -> Iterable[Change]:
    for row in dict.fromkeys((*a, *b)):
        before, after = a.get(row, "none"), b.get(row, "none")
        if before != after:
            yield Change("level", " ".join(row), before, after, _rank(after) < _rank(before))


def _rank(level: Any) -> int:
    return 1 + LEVELS.index(level) if level in LEVELS else 0


def _checks(a: Mapping[Row, CheckResult], b: Mapping[Row, CheckResult]) -> Iterable[Change]:
    for row in dict.fromkeys((*a, *b)):
        mine, other = a.get(row), b.get(row)
        before, after = (one.status if one else "none" for one in (mine, other))
        if before != after:
            yield Change("status", " ".join(row), before, after, _worse(before, after))
        elif mine and other and mine.ok:
            yield from _moved(" ".join(row), mine, other)


def _worse(before: str, after: str) -> bool:
    """Whether a status says less than another. A check that was not there before can only be lost by failing."""
    order = ["Pass", "QualityWarning", "none", *(s for s in RESULT_STATUSES if s not in ("Pass", "QualityWarning"))]
    return order.index(after) > order.index(before)


def _moved(where: str, mine: CheckResult, other: CheckResult) -> Iterable[Change]:
    """Numbers that changed by more than twice and are not both below what rounding explains."""
    theirs = {tensor.name: tensor for tensor in other.tensors}
    for tensor in mine.tensors:
        if tensor.name not in theirs:
            continue
        floor = CLASSES[tensor.tolerance].floor if tensor.tolerance in CLASSES else 0.0
        for name in ("tensor", "slice", "peak"):
            before, after = getattr(tensor, name), getattr(theirs[tensor.name], name)
            low, high = sorted((before, after))
            if high > max(MOVED * low, floor):
                yield Change("number", f"{where} {tensor.name}.{name}", f"{before:.3g}", f"{after:.3g}", False)
