"""Finds the fastest right tactic of a provider: proven on cases first, timed second, and only then remembered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.case_files import CaseFiles
from k3hal.debug.forks import Forks
from k3hal.debug.tune_jobs import GATE, MEASURE
from k3hal.debug.tune_timing import Comparison, compare_rounds
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.call import DimValue
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.select import offered
from k3hal.dispatch.tactic_file import load_tactics, tactics_folder, update_tactics
from k3hal.dispatch.tactics import Fingerprint, Rejection, Tuned, fingerprint


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds a tactic may take for all cases, and seconds spent on timing it for one class of calls."""

    timeout: float = 60.0
    timing: float = 0.5


@dataclass(frozen=True, slots=True)
class Timed:
    """One tactic's time for one class of calls, against the default's."""

    phase: str
    dims: Mapping[str, DimValue]
    tactic: str
    result: Comparison


@dataclass(frozen=True, slots=True)
class Result:
    """What tuning one provider in one dtype found. `new` are the rejections made now, `known` those made before.

    `failed` is why nothing was tuned: the default tactic itself is wrong.
    """

    op: str
    provider: str
    dtype: str
    tuned: tuple[Tuned, ...] = ()
    new: tuple[Rejection, ...] = ()
    known: tuple[Rejection, ...] = ()
    failed: str = ""
    timed: tuple[Timed, ...] = ()


@dataclass(frozen=True, slots=True)
class Tuner:
    """Tunes providers on one device. `note` is told what is being done."""

    device: DeviceDescription
    forks: Forks
    limits: Limits = Limits()
    note: Callable[[str], None] = lambda _: None

    def tune(self, provider: Provider, cases: Sequence[Case], timed: Sequence[Case]) -> list[Result]:
        """Prove the provider's tactics on all `cases`, and decide for the classes of calls of those in `timed`.

        Cases it does not run are left out; what is found goes into the cache as soon as it is found. Raises
        `UnsupportedError` for a provider whose source cannot be read, since nothing would tell when it changes.
        """
        made_for = fingerprint(provider, self.device)
        if not made_for.source:
            raise UnsupportedError(f"{provider.id} of {provider.op} was not read from a file and cannot be tuned")
        runs = [case for case in cases if provider.answer(case.call(self.device))]
        classes = [case for case in timed if provider.answer(case.call(self.device))]
        dtypes = dict.fromkeys(case.dtype for case in classes)
        with CaseFiles() as files:
            return [self._tune(provider, made_for, dtype, runs, classes, files) for dtype in dtypes]

    def _tune(
        self,
        provider: Provider,
        made_for: Fingerprint,
        dtype: str,
        runs: list[Case],
        timed: list[Case],
        files: CaseFiles,
    ) -> Result:
        runs, timed = ([case for case in cases if case.dtype == dtype] for cases in (runs, timed))
        tactics = dict.fromkeys(name for case in runs for name in self._offered(provider, case))
        names = (provider.op, provider.id, dtype)
        cache, right, new, known = load_tactics(), [], [], []
        for tactic in tactics:
            if before := cache.rejection(provider, tactic, dtype, made_for):
                known.append(before)
                continue
            wrong = self._prove(provider, tactic, [c for c in runs if tactic in self._offered(provider, c)], files)
            if wrong is None:
                right.append(tactic)
                continue
            verdict, case = wrong
            why = f"{verdict.status} on {verdict.case}: {'; '.join(verdict.reasons)}"
            if tactic == DEFAULT:
                return Result(*names, failed=f"the default tactic is not right: {why}")
            path = _keep(case, f"{provider.op}-{provider.id}-{tactic}-{dtype}.k3case")
            rejection = Rejection(provider.op, provider.id, tactic, dtype, made_for, verdict.status, why, str(path))
            update_tactics(lambda c, r=rejection: c.with_rejection(r))
            new.append(rejection)
        found, timings = [], []
        for same in _classes(timed):
            entry, measured, rejections = self._decide(provider, right, same, made_for, len(runs), files)
            update_tactics(lambda c, e=entry: c.with_tuned(e))
            for rejection in rejections:
                update_tactics(lambda c, r=rejection: c.with_rejection(r))
            found.append(entry)
            new += rejections
            timings += measured
        return Result(*names, tuple(found), tuple(new), tuple(known), timed=tuple(timings))

    def _offered(self, provider: Provider, case: Case) -> Iterable[str]:
        return offered(provider, case.call(self.device))

    def _prove(
        self, provider: Provider, tactic: str, cases: list[Case], files: CaseFiles
    ) -> tuple[Verdict, Case | str] | None:
        """None if the tactic is right on all cases, else the verdict on the first that it is not, and that case (or
        the file of a smaller one)."""
        self.note(f"{provider.op}: proving {provider.id}:{tactic} on {len(cases)} cases")
        outcome = self.forks.run(
            GATE,
            self.limits.timeout,
            target=f"{provider.id}:{tactic}",
            device=self.device.id,
            cases=[files.case(case) for case in cases],
            expected=[files.expected(case) for case in cases],
        )
        report: dict[str, Any] = outcome.report or {"case": 0}
        if "verdict" in report:
            return Verdict.from_json(report["verdict"]), report.get("small") or cases[report["case"]]
        if outcome.status == "Done":
            return None
        case = cases[report["case"] or 0]
        return Verdict(case.op, f"{provider.id}:{tactic}", case.id, outcome.status, (outcome.why,)), case

    def _decide(
        self,
        provider: Provider,
        right: list[str],
        cases: list[Case],
        made_for: Fingerprint,
        proven_on: int,
        files: CaseFiles,
    ) -> tuple[Tuned, list[Timed], list[Rejection]]:
        """Of the tactics proven right, the one that is fastest on cases of one class by more than noise."""
        first, call = cases[0], cases[0].call(self.device)
        best, timings, rejections = (DEFAULT, 0.0, 0.0), [], []
        for tactic in right:
            if tactic == DEFAULT or tactic not in offered(provider, call):
                continue
            self.note(f"{provider.op}: timing {provider.id}:{tactic} for {_dims(first)}, {first.dtype}")
            outcome = self.forks.run(
                MEASURE,
                self.limits.timeout,
                default=f"{provider.id}:{DEFAULT}",
                target=f"{provider.id}:{tactic}",
                device=self.device.id,
                cases=[files.case(case) for case in cases],
                seconds=self.limits.timing,
            )
            if outcome.status != "Done":
                names = (provider.op, provider.id, tactic, first.dtype)
                path = _keep(first, f"{provider.op}-{provider.id}-{tactic}-{first.dtype}.k3case")
                why = f"{outcome.status} while it was timed on {first.id}: {outcome.why}"
                rejections.append(Rejection(*names, made_for, outcome.status, why, str(path)))
                continue
            result = compare_rounds([(a, b, c) for a, b, c in outcome.report])
            timings.append(Timed(first.phase, dict(first.dims), tactic, result))
            if result.wins and result.gain > best[1]:
                best = (tactic, result.gain, result.noise)
        names = (provider.op, provider.id, first.dtype, first.phase, dict(first.dims))
        return Tuned(*names, made_for, *best, proven_on), timings, rejections


def _classes(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that selection cannot tell apart, together."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.phase, _dims(case)), []).append(case)
    return list(groups.values())


def _dims(case: Case) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(case.dims.items())) or "no dims"


def _keep(case: Case | str, name: str) -> Path:
    """The case (or the file of one) among those of rejected tactics."""
    path = tactics_folder() / "cases" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(case, Case):
        return save_case(case, path)
    return Path(shutil.copyfile(case, path))
