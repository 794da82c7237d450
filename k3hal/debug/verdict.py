"""The result of checking one case: a status, the numbers behind it, and its JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["Pass", "QualityWarning", "NotSupported", "Fail", "Crash", "Timeout"]
STATUSES: tuple[Status, ...] = get_args(Status)
"""From best to worst."""


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """One output: its tolerance class and the three numbers, each RMS or largest error over the golden's RMS.

    `peer` is the `tensor` number of the CPU provider on the same case, None where there is no peer.
    """

    name: str
    tolerance: str
    status: Status
    tensor: float = 0.0
    slice: float = 0.0
    peak: float = 0.0
    peer: float | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        numbers = {"tensor": self.tensor, "slice": self.slice, "peak": self.peak, "peer": self.peer}
        finite = {k: None if v is None or not math.isfinite(v) else v for k, v in numbers.items()}
        return {
            "name": self.name,
            "tolerance": self.tolerance,
            "status": self.status,
            **finite,
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorNumbers:
        numbers = {key: math.inf if data[key] is None else data[key] for key in ("tensor", "slice", "peak")}
        text = {key: data[key] for key in ("name", "tolerance", "status", "peer", "problem")}
        return cls(**numbers, **text)


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
