"""The test of the tests: every seeded fault must be found by the checks that providers pass, and nothing else."""

from __future__ import annotations

import fnmatch
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3hal.conform.faults import Fault, base_of, catalogue
from k3hal.conform.result import BAD, INVARIANT, SAMPLE, CheckResult
from k3hal.conform.suite import Check, Workpiece, checks_of, run_check
from k3hal.debug.target import Target, peer_of
from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

SCHEMA = "k3hal.conform_selftest/1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one fault: the check that found it, if any, and how many checks of how many seconds it took."""

    fault: Fault
    provider: str
    found: CheckResult | None
    checks: int
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether a check of the fault's own operator failed."""
        return self.found is not None and self.found.op == self.fault.op

    def to_json(self) -> dict[str, Any]:
        return {
            "fault": self.fault.name,
            "op": self.fault.op,
            "bug": self.fault.bug,
            "provider": self.provider,
            "caught": self.caught,
            "named_op": self.found.op if self.found else "",
            "case": self.found.case if self.found else "",
            "kind": self.found.kind if self.found else "",
            "reasons": list(self.found.reasons) if self.found else [],
            "checks": self.checks,
            "seconds": round(self.seconds, 4),
        }


@dataclass(slots=True)
class SelfTest:
    """Runs faults, and afterwards the right providers on the checks that found them.

    `full` tries every check of an operator on its right provider, K3-sized samples included. `false_alarms` are the
    checks that a right provider failed.
    """

    full: bool = False
    false_alarms: list[CheckResult] = field(default_factory=list)
    _pieces: dict[str, Workpiece] = field(default_factory=dict)
    _found: dict[str, dict[str, Check]] = field(default_factory=dict)

    def run(self, faults: Iterable[Fault]) -> Iterator[Outcome]:
        """The outcome of each fault as it is known, operator by operator; each operator's right provider is checked
        after its faults."""
        for op, group in itertools.groupby(faults, key=lambda fault: fault.op):
            yield from map(self.one, group)
            self._control(op)

    def one(self, fault: Fault) -> Outcome:
        """Plant one fault and check until something fails."""
        begun = time.perf_counter()
        base = base_of(fault.op)
        target, count = fault.planted(base), 0
        for count, check in enumerate(ordered(fault, self.full), 1):
            result = self._run(target, check)
            if result and result.status in BAD:
                self._found.setdefault(fault.op, {}).setdefault(check.key, check)
                return Outcome(fault, base.id, result, count, time.perf_counter() - begun)
        return Outcome(fault, base.id, None, count, time.perf_counter() - begun)

    def _run(self, target: Target, check: Check) -> CheckResult | None:
        at = self._pieces.setdefault(check.key.removesuffix(check.kind), Workpiece())
        peer = peer_of(at.case(check), target, probe("cpu"))
        return run_check(target, check, peer=peer, at=at)

    def _control(self, op: str) -> None:
        """A right provider must pass what found the faults."""
        base = base_of(op)
        checks = checks_of(get_operator(op), quick=False) if self.full else self._found.get(op, {}).values()
        for check in checks:
            result = self._run(base, check)
            if result and result.status in BAD:
                self.false_alarms.append(result)
        for key in [k for k in self._pieces if k.startswith(f"{op}-")]:
            del self._pieces[key]


def ordered(fault: Fault, full: bool = False) -> list[Check]:
    """The checks a fault meets: the one expected to find it, then samples, then invariants. They are those of
    `conform run --quick`, or in full of `conform run`."""
    checks = checks_of(get_operator(fault.op), quick=not full)
    return sorted(
        checks, key=lambda check: (not _expected(fault, check), "k3" in check.sample.tags, check.kind != SAMPLE)
    )


def _expected(fault: Fault, check: Check) -> bool:
    if fault.first == check.kind.removeprefix(INVARIANT):
        return True
    return check.kind == SAMPLE and fault.first in (check.sample.name, f"{check.sample.name}:{check.sample.dtype}")


def faults_matching(pattern: str) -> Sequence[Fault]:
    """The faults whose name, or OP.NAME, matches a glob. Raises `UsageError` when none does."""
    found = [f for f in catalogue() if fnmatch.fnmatch(f.name, pattern) or fnmatch.fnmatch(f.id, pattern)]
    if not found:
        raise UsageError(f"no seeded fault matches {pattern!r}", hint="names are OP.NAME, as the table prints them")
    return found
