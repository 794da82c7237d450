"""What a provider of an operator must pass: its samples, and its invariants on each of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from k3hal.conform.quick import quick_samples
from k3hal.conform.result import INVARIANT, SAMPLE, SHAPE_CLASSES, CheckResult, ShapeClass
from k3hal.debug.case import Case, sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.golden import golden
from k3hal.debug.invariants import check_invariant, invariants_of
from k3hal.debug.target import Target
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.operator import Operator, Sample


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to check of an operator: a sample's outputs, or an invariant on it. Makes no tensor until asked."""

    operator: Operator
    sample: Sample
    kind: str = SAMPLE
    seed: int = 0

    @property
    def case_id(self) -> str:
        """The id of the case, known without making it."""
        return f"{self.operator.name}-{self.sample.name}-{self.sample.dtype}" + (
            f"-seed{self.seed}" if self.seed else ""
        )

    @property
    def shape_class(self) -> ShapeClass:
        for name in reversed(SHAPE_CLASSES):
            if name in self.sample.tags:
                return name
        return "tiny"

    @property
    def key(self) -> str:
        """What names the check in a must-pass list."""
        return f"{self.case_id} {self.kind}"

    def case(self) -> Case:
        return sample_case(self.operator, self.sample, self.seed)

    def result(self, provider: str) -> CheckResult:
        """An empty result, to be filled."""
        sample = self.sample
        names = (self.operator.name, provider, sample.dtype, self.shape_class, sample.phase)
        return CheckResult(*names, self.case_id, self.kind, "NotSupported")


@dataclass(slots=True)
class Workpiece:
    """Keeps the case in hand and its golden, so that all checks and providers of one sample share them."""

    _key: str = ""
    _case: Case | None = None
    _golden: Mapping[str, Tensor] = field(default_factory=dict)

    def case(self, one: Check) -> Case:
        if self._case is None or self._key != one.case_id:
            self._key, self._case, self._golden = one.case_id, one.case(), {}
        return self._case

    def golden(self, one: Check) -> Mapping[str, Tensor]:
        """The reference's outputs, computed once. What the reference itself raises passes through."""
        case = self.case(one)
        if not self._golden:
            self._golden = golden(one.operator, case.args)
        return self._golden


def checks_of(
    operator: Operator,
    *,
    quick: bool,
    tags: Collection[str] | None = None,
    dtypes: Collection[str] | None = None,
    graphs: bool = False,
) -> list[Check]:
    """Every check of an operator, those of one sample together; `quick` takes the must-pass subset of samples.

    Samples too large for a CPU are left out unless their tag is asked for. With `graphs` the replay of a captured
    graph is an invariant of every operator.
    """
    samples = list(samples_of(operator, tags=tags or (), dtypes=dtypes or ()))
    names = dict.fromkeys((*invariants_of(operator), *(("replay",) if graphs else ())))
    kinds = [SAMPLE, *(INVARIANT + name for name in names)]
    return [
        Check(operator, sample, kind) for sample in (quick_samples(samples) if quick else samples) for kind in kinds
    ]


def run_checks(
    target: Target, checks: Iterable[Check], *, peer: Target | None = None, at: Workpiece | None = None
) -> Iterator[CheckResult]:
    """Judge one target (a mutant of a provider too) by golden, caps, peer and invariants, in the checks' order.

    An invariant that a case gives nothing to try has no result.
    """
    at = at or Workpiece()
    for one in checks:
        result = run_check(target, one, peer=peer, at=at)
        if result:
            yield result


def run_check(target: Target, one: Check, *, peer: Target | None, at: Workpiece) -> CheckResult | None:
    """One check with one target; None for an invariant that does not apply to the case."""
    begun = time.perf_counter()
    case = at.case(one)
    if one.kind == SAMPLE:
        verdict: Verdict | None = check(case, target, peer=peer, expected=at.golden(one))
    else:
        verdict = check_invariant(one.kind.removeprefix(INVARIANT), case, target)
    if verdict is None:
        return None
    return one.result(target.id).judged(verdict, time.perf_counter() - begun)
