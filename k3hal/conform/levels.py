"""Evidence levels: what a run's results prove of a provider, per dtype and class of shapes and altogether."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from k3hal.conform.result import CheckResult
from k3hal.dispatch.evidence import LEVELS, Level
from k3hal.dispatch.tolerance import CLASSES

Pair = tuple[str, str]
"""An operator and a provider."""


def level_rows(
    results: Iterable[CheckResult],
    *,
    quick: bool = False,
    end_to_end: Collection[str] = (),
    measured: Collection[str] = (),
) -> list[dict[str, Any]]:
    """A row for every (dtype, shape class) of one provider's results that it says Yes to.

    E0 if nothing gave an output, E1 if something did, E3 if all passed, and then E4 in the dtypes of `end_to_end`,
    whose end-to-end check ran this provider and passed, and E5 in those of them that were `measured`. A run that tried
    too little for E3, `quick`, and one of an emulated machine end at E2. A waived failure is none that passed.
    """
    groups: dict[tuple[str, str], list[CheckResult]] = {}
    for result in results:
        if result.status != "NotSupported":
            groups.setdefault((result.dtype, result.shape_class), []).append(result)
    rows = []
    for (dtype, shape_class), mine in sorted(groups.items()):
        passed = sum(result.ok for result in mine)
        level: Level = "E1" if any(result.ok or result.tensors for result in mine) else "E0"
        if passed == len(mine):
            level = "E2" if quick else "E3"
        if level == "E3" and dtype in end_to_end:
            level = "E5" if dtype in measured else "E4"
        row = {"dtype": dtype, "shape_class": shape_class, "level": level, "passed": passed, "of": len(mine)}
        rows.append(row | {"worst": worst_numbers(mine)})
    return rows


def dtypes_measured(timings: Iterable[Mapping[str, Any]]) -> set[str]:
    """The dtypes with a time that stands beside both the roofline and a peer's time of the same case."""
    return {t["dtype"] for t in timings if t.get("seconds") and t.get("roofline") and t.get("peer")}


def overall(rows: Sequence[dict[str, Any]]) -> Level:
    """The level of all rows together, the lowest of them; E0 of none."""
    return LEVELS[min((LEVELS.index(row["level"]) for row in rows), default=0)]


def worst_numbers(results: Iterable[CheckResult]) -> dict[str, float | None]:
    """The largest of each number over all samples' outputs, and of their ratio to the peer's or the floor."""
    tensors = [tensor for result in results if not result.invariant for tensor in result.tensors]
    out: dict[str, float | None] = {}
    for name in ("tensor", "slice", "peak"):
        out[name] = _finite(max((getattr(tensor, name) for tensor in tensors), default=0.0))
    ratios = [
        tensor.tensor / max(tensor.peer, CLASSES[tensor.tolerance].floor, 1e-30)
        for tensor in tensors
        if tensor.peer is not None and tensor.tolerance in CLASSES
    ]
    out["peer_ratio"] = _finite(max(ratios)) if ratios else None
    return out


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
