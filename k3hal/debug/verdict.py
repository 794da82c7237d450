"""The result of checking one case: a status, the numbers behind it, and its JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["Pass", "QualityWarning", "NotSupported", "Fail", "Crash", "Timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""From best to worst."""
_NUMBERS = ("tensor", "slice", "peak")


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """One output: its tolerance class and the three numbers, each RMS or largest error over the golden's RMS.

    `peer` is the `tensor` number of the CPU provider on the same case, None where there is no peer. `caps` (on tensor,
    slice and peak) and `floor` are those in force for the case's values; None in older reports.
    """

    name: str
    tolerance: str
    status: Status
    tensor: float = 0.0
    slice: float = 0.0
    peak: float = 0.0
    peer: float | None = None
    problem: str = ""
    caps: tuple[float, float, float] | None = None
    floor: float | None = None

    def to_json(self) -> dict[str, Any]:
        numbers = {"tensor": self.tensor, "slice": self.slice, "peak": self.peak, "peer": self.peer}
        finite = {k: None if v is None or not math.isfinite(v) else v for k, v in numbers.items()}
        judged_by: dict[str, Any] = {}
        if self.caps is not None:
            caps = zip(_NUMBERS, self.caps, strict=True)
            judged_by = {"caps": {k: v if math.isfinite(v) else None for k, v in caps}, "floor": self.floor}
        return {
            "name": self.name,
            "tolerance": self.tolerance,
            "status": self.status,
            **finite,
            "problem": self.problem,
            **judged_by,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorNumbers:
        """Raises `KeyError` or `ValueError` for what is none. A number that is null is one that is not finite."""
        text = {key: data[key] for key in ("name", "tolerance", "status", "problem")}
        if odd := next((key for key, value in text.items() if not isinstance(value, str)), ""):
            raise ValueError(f"{odd} of a tensor is not a string")
        if data["status"] not in STATUSES:
            raise ValueError(f"status of a tensor is {data['status']!r}")
        tensor, each, peak = (_number(data, key) for key in _NUMBERS)
        peer = None if data["peer"] is None else _number(data, "peer")
        caps = floor = None
        if "caps" in data:
            if not isinstance(data["caps"], Mapping):
                raise ValueError("caps are not an object")
            one, two, three = (_number(data["caps"], key) for key in _NUMBERS)
            caps, floor = (one, two, three), _number(data, "floor")
        return cls(**text, tensor=tensor, slice=each, peak=peak, peer=peer, caps=caps, floor=floor)


def _number(data: Mapping[str, Any], key: str) -> float:
    value = data[key]
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{key} is {value!r}, not a number from 0 on")
    return float(value)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether `provider` does what operator `op` says on a case; `problems` are reasons beyond the numbers."""

    op: str
    provider: str
    case: str
    status: Status
    problems: tuple[str, ...] = ()
    tensors: tuple[TensorNumbers, ...] = ()
    seconds: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status in ("Pass", "QualityWarning")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason why this is no plain Pass, in words."""
        return (*self.problems, *(f"{t.name}: {t.problem}" for t in self.tensors if t.problem))

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "provider": self.provider,
            "case": self.case,
            "status": self.status,
            "problems": list(self.problems),
            "tensors": [t.to_json() for t in self.tensors],
            "seconds": self.seconds,
            **self.extra,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        tensors = tuple(TensorNumbers.from_json(t) for t in data["tensors"])
        words = {key: data[key] for key in ("op", "provider", "case", "status", "seconds")}
        return cls(**words, problems=tuple(data["problems"]), tensors=tensors)


def worst(statuses: list[Status]) -> Status:
    """The worst of several; Pass of none."""
    return STATUSES[max((STATUSES.index(status) for status in statuses), default=0)]


def exit_code(statuses: list[Status]) -> int:
    """0 all pass, 1 a mismatch, 2 nothing ran because nothing is supported, 3 a crash or a hang."""
    if any(s in ("Crash", "Timeout") for s in statuses):
        return 3
    if "Fail" in statuses:
        return 1
    return 2 if statuses and all(s == "NotSupported" for s in statuses) else 0
