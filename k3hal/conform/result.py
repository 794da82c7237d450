"""One checked thing of a conformance run: a sample or an invariant of it, judged with one provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from k3hal.debug.verdict import STATUSES, Status, TensorNumbers, Verdict

ShapeClass = Literal["tiny", "edge", "adversarial", "k3", "device"]
SHAPE_CLASSES: tuple[ShapeClass, ...] = get_args(ShapeClass)
"""A sample's class is the last of these among its tags: what it adds to plainer ones."""
ResultStatus = Status | Literal["Waived"]
RESULT_STATUSES: tuple[ResultStatus, ...] = (*STATUSES, "Waived")
SAMPLE = "sample"
INVARIANT = "invariant:"
BAD: tuple[ResultStatus, ...] = ("Fail", "Crash", "Timeout")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one check with one provider.

    `case` is the case's id and `kind` is `sample` or `invariant:NAME`: with `op` and `provider` they name the result.
    `seconds` is the whole check's time, `problems` every reason beyond the numbers, `case_file` (failures only) the
    case's place relative to the package, `waiver` the id of the waiver that covers it.
    """

    op: str
    provider: str
    dtype: str
    shape_class: ShapeClass
    phase: str
    case: str
    kind: str
    status: ResultStatus
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    tensors: tuple[TensorNumbers, ...] = ()
    case_file: str = ""
    waiver: str = ""

    @property
    def ok(self) -> bool:
        """Pass or QualityWarning."""
        return self.status in ("Pass", "QualityWarning")

    @property
    def invariant(self) -> str:
        """The invariant's name; empty for a sample."""
        return self.kind.removeprefix(INVARIANT) if self.kind.startswith(INVARIANT) else ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason why this is no plain Pass, in words."""
        return (*self.problems, *(f"{t.name}: {t.problem}" for t in self.tensors if t.problem))

    def judged(self, verdict: Verdict, seconds: float) -> CheckResult:
        """This result with a verdict's status, problems and numbers."""
        return replace(self, status=verdict.status, seconds=seconds, problems=verdict.problems, tensors=verdict.tensors)

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "provider": self.provider,
            "dtype": self.dtype,
            "shape_class": self.shape_class,
            "phase": self.phase,
            "case": self.case,
            "kind": self.kind,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "problems": list(self.problems),
            "tensors": [t.to_json() for t in self.tensors],
            "case_file": self.case_file,
            "waiver": self.waiver,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckResult:
        """Raises `KeyError`, `TypeError` or `ValueError` for what is none; the package reader words it."""
        text = ("op", "provider", "dtype", "phase", "case", "kind", "status", "shape_class", "case_file", "waiver")
        words = {key: data[key] for key in text}
        if odd := next((key for key in text if not isinstance(words[key], str)), ""):
            raise ValueError(f"{odd} is not a string")
        if words["status"] not in RESULT_STATUSES:
            raise ValueError(f"status is {words['status']!r}")
        if words["shape_class"] not in SHAPE_CLASSES:
            raise ValueError(f"shape_class is {words['shape_class']!r}")
        if isinstance(data["seconds"], bool) or not isinstance(data["seconds"], int | float):
            raise ValueError(f"seconds is {data['seconds']!r}")
        return cls(
            **words,
            seconds=float(data["seconds"]),
            problems=tuple(data["problems"]),
            tensors=tuple(TensorNumbers.from_json(t) for t in data["tensors"]),
        )
