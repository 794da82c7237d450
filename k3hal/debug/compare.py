"""Compares providers with the reference, or with each other, over many cases; keeps the smallest that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.check import check
from k3hal.debug.execute import execute
from k3hal.debug.invariants import check_invariant, invariants_of
from k3hal.debug.isolate import check_isolated
from k3hal.debug.shrink import shrink
from k3hal.debug.target import find_target, peer_of
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import DispatchError, UsageError
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.select import REFERENCE

BAD = ("Fail", "Crash", "Timeout")


@dataclass(frozen=True, slots=True)
class How:
    """How cases are compared: on which device, against what, in a child process or not, with which time limit."""

    device: DeviceDescription
    against: str = REFERENCE
    isolate: bool = False
    timeout: float = 60.0
    repeat: bool = True


def compare_one(
    case: Case, provider: str, device: DeviceDescription, *, against: str = REFERENCE, repeat: bool = True
) -> Verdict:
    """One case with one provider; NotSupported with the reasons where it says No.

    Against the reference that is the golden and, on the same case, the CPU provider as the peer. Raises `UsageError`
    for an unknown name.
    """
    try:
        target = find_target(case, provider, device)
        if against == REFERENCE:
            return check(case, target, peer=peer_of(case, target, probe("cpu")), repeat=repeat)
        other = find_target(case, against, device)
    except DispatchError as error:
        return Verdict(case.op, provider, case.id, "NotSupported", (str(error),))
    expected = execute(get_operator(case.op), other, case.args).outputs
    return check(case, target, expected=expected, repeat=repeat)


def compare_all(cases: Iterable[Case], providers: Iterable[str], how: How) -> Iterator[tuple[Case, Verdict]]:
    """Every case with every provider, as they are done."""
    providers = list(providers)
    for case in cases:
        for provider in providers:
            yield case, _one(case, provider, how)


def _one(case: Case, provider: str, how: How) -> Verdict:
    if not how.isolate:
        return compare_one(case, provider, how.device, against=how.against, repeat=how.repeat)
    options = {"against": how.against, "repeat": how.repeat, "timeout": how.timeout}
    return check_isolated(case, provider, device=how.device.id, **options)


def save_smallest(
    failures: Iterable[tuple[Case, Verdict]], how: How, folder: Path, note: Callable[[str], None]
) -> dict[str, Path]:
    """Shrink the smallest failing case of each provider and save it in `folder`; the files by provider."""
    best: dict[str, tuple[Case, Verdict]] = {}
    for case, verdict in failures:
        if verdict.provider not in best or case.nbytes < best[verdict.provider][0].nbytes:
            best[verdict.provider] = (case, verdict)
    saved = {}
    for provider, (case, verdict) in best.items():
        note(f"shrinking {case.id} ({provider})")
        # What crashes or hangs costs a process, or the whole time limit, for every try.
        limit = 60 if verdict.status == "Fail" else 8
        small = shrink(case, lambda c, p=provider: _one(c, p, how).status in BAD, limit=limit)
        # Of the sample it was made of; how it was made smaller is in the case itself.
        name = f"{small.op}-{provider}-{case.name}-{case.dtype}".replace("/", "_")[:120]
        saved[provider] = save_case(small, folder / f"{name}.k3case")
    return saved


def compare_invariants(
    cases: Iterable[Case], providers: Iterable[str], how: How, names: Iterable[str]
) -> Iterator[tuple[Case, Verdict]]:
    """Every invariant named (`all`: those of the operator's contract) for every case it can be tried on.

    Raises `UsageError` for a name that is none, or that the operator does not promise.
    """
    providers, names = list(providers), list(names)
    for case in cases:
        promised = invariants_of(get_operator(case.op))
        for provider in providers:
            for name in promised if "all" in names else names:
                if name not in (*promised, "replay"):
                    hint = f"it does {', '.join(promised) or 'none'}"
                    raise UsageError(f"{case.op} does not promise {name!r}", hint=hint)
                try:
                    verdict = check_invariant(name, case, find_target(case, provider, how.device))
                except DispatchError as error:
                    verdict = Verdict(case.op, provider, case.id, "NotSupported", (str(error),))
                if verdict:
                    yield case, verdict
