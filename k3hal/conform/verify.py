"""Whether a package can be trusted: nothing left out, nothing altered, made from sources that others have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k3hal.conform.environment import is_emulated
from k3hal.conform.levels import dtypes_measured, level_rows, overall
from k3hal.conform.must_pass import missing, must_pass, selection_of
from k3hal.conform.package import CASES, PLAN, STATEMENT, read_report
from k3hal.conform.policy import policy_classes, policy_hash
from k3hal.conform.result import CheckResult
from k3hal.conform.run import dtypes_proven
from k3hal.conform.selection import Selection
from k3hal.conform.source_state import same_sources, source_root
from k3hal.conform.sources import source_hash
from k3hal.conform.statement import run_name, statement_text
from k3hal.conform.values import value_differences
from k3hal.conform.verify_numbers import bounded, check_numbers
from k3hal.debug.case_file import load_case
from k3hal.dispatch.plan_file import load_plan, pairs_in
from k3hal.dispatch.registry import BUILTIN, default_registry
from k3hal.errors import InputError

Report = Mapping[str, Any]


def verify(package: Path) -> list[str]:
    """Every reason to reject a package, each in one line; none for one that can be trusted.

    A failure that is reported is no reason: the levels say what it costs. Raises `InputError` for a malformed report.
    """
    report = read_report(package)
    try:
        selection = selection_of(report)
    except TypeError as error:
        raise InputError(f"{package}: the selection cannot be read: {error}") from error
    return [
        *_sources(report),
        *_hashes(report),
        *_policy(report),
        *_list(report, selection),
        *_completeness(report, selection),
        *check_numbers(report, selection),
        *_levels(report),
        *_counts(report),
        *_files(package, report),
    ]


def _sources(report: Report) -> Iterator[str]:
    if report["statement"]["dirty"]:
        yield "the tree was dirty: sources had changes that no commit holds"
    for one in report["packages"]:
        if one["dirty"]:
            yield f"the tree of {one['name']} was dirty: sources of backend {one['backend']} that no commit holds"


def notes(package: Path) -> list[str]:
    """What `verify` could not look at, a line each. Raises `InputError` as it does."""
    report, said = read_report(package), []
    if number := bounded(report):
        why = "; ".join(value_differences(report))
        said.append(f"floors and caps of {number} outputs bounded, not re-derived: {why}")
    if not _comparable(report):
        commit, what = report["statement"]["commit"] or "no known commit", "hashes of providers' sources"
        said.append(f"the package is of {commit} and the sources here are not: {what} were not compared")
    return said


def _comparable(report: Report) -> bool:
    root = source_root()
    return root is not None and same_sources(root, report["statement"]["commit"])


def _hashes(report: Report) -> Iterator[str]:
    """Where the sources are those of the report's commit, so are the hashes of this tree's own providers."""
    if not _comparable(report):
        return
    here = {(p.op, p.id): p for p in default_registry().providers}
    for one in report["providers"]:
        provider = here.get((one["op"], one["provider"]))
        mine = provider is not None and provider.fn.__module__.startswith(f"{BUILTIN}.")
        if provider and mine and not one["reference_only"] and one["source_hash"] != source_hash(provider):
            yield f"{one['provider']} of {one['op']}: the hash of its sources is not that of the report's commit"


def _policy(report: Report) -> Iterator[str]:
    ours, theirs = policy_classes(), report["policy"]["classes"]
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            yield f"the tolerance class {name} differs from this k3hal's"
    if report["policy"]["hash"] != policy_hash() and ours == theirs:
        yield "the policy's hash differs: other outputs are judged by other classes here"


def _list(report: Report, selection: Selection) -> Iterator[str]:
    ours, theirs = must_pass(selection), report["must_pass"]
    if (ours["hash"], ours["count"]) != (theirs["hash"], theirs["count"]):
        yield f"the must-pass list is not this k3hal's: {theirs['count']} checks, here {ours['count']}"
    if report["device"]["vendor"] != "cpu" and not selection.large and not is_emulated(report):
        yield "the full-size samples are left out, which only a CPU may"


def _completeness(report: Report, selection: Selection) -> Iterator[str]:
    """Every operator listed, and a result for every check of every provider listed, once, and for no other."""
    wanted = set(selection.operators())
    listed = {one["op"] for one in report["providers"]}
    for op in sorted(wanted - listed):
        yield f"operator {op} is missing"
    yield from _unlisted(report, selection)
    results: dict[tuple[str, str], list[CheckResult]] = {}
    for check in report["checks"]:
        results.setdefault((check.op, check.provider), []).append(check)
    known = {(one["op"], one["provider"]) for one in report["providers"]}
    for op, provider in sorted(set(results) - known):
        yield f"checks of {op} with {provider}, which is not among the providers"
    for one in report["providers"]:
        mine = results.get((one["op"], one["provider"]), [])
        if one["op"] in wanted and not one["reference_only"]:
            yield from _complete(one, mine, selection)


def _unlisted(report: Report, selection: Selection) -> Iterator[str]:
    """Providers that this k3hal would have judged, and the report says nothing of."""
    registry, known = default_registry(), {(one["op"], one["provider"]) for one in report["providers"]}
    for op in selection.operators():
        for provider in registry.of(op):
            auto = registry.backends[provider.backend].auto
            wanted = provider.backend == selection.backend if selection.backend else auto
            if wanted and (op, provider.id) not in known:
                yield f"{provider.id} of {op} is not listed"


def _complete(one: Report, mine: list[CheckResult], selection: Selection) -> Iterator[str]:
    who, keys = f"{one['provider']} of {one['op']}", [f"{r.case} {r.kind}" for r in mine]
    refused = [r.case for r in mine if r.kind == "sample" and r.status == "NotSupported"]
    if not mine:
        said_no = {case for refusal in one["refusals"] for case in refusal["cases"]}
        refused, keys = list(said_no), [f"{case} sample" for case in said_no]
    lost = missing(selection, one["op"], keys, one["not_applicable"], refused)
    if lost:
        yield f"{who}: no result for {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
    extra = sorted(set(keys) - {check.key for check in selection.checks(one["op"])})
    if extra:
        yield f"{who}: a result for {extra[0]}, which is not in the must-pass list"
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        yield f"{who}: {twice[0]} has two results"


def _levels(report: Report) -> Iterator[str]:
    """The levels are those that the checks prove."""
    ends = [_End(one["dtype"], one["status"], {tuple(pair) for pair in one["ran"]}) for one in report["end_to_end"]]
    for one in report["providers"]:
        mine = [r for r in report["checks"] if (r.op, r.provider) == (one["op"], one["provider"])]
        rows = level_rows(
            mine,
            quick=report["selection"]["quick"] or is_emulated(report),
            end_to_end=dtypes_proven(ends, one["op"], one["provider"]),
            measured=dtypes_measured(one.get("timings", ())),
        )
        if one["level"] != overall(rows) or not _same_rows(one["levels"], rows):
            yield f"{one['provider']} of {one['op']}: says {one['level']}, its checks prove {overall(rows)}"


class _End:
    def __init__(self, dtype: str, status: str, ran: set[Any]) -> None:
        self.dtype, self.status, self.ran = dtype, status, ran


def _same_rows(theirs: list[Any], ours: list[dict[str, Any]]) -> bool:
    keys = ("dtype", "shape_class", "level", "passed", "of")
    if len(theirs) != len(ours):
        return False
    return all(
        isinstance(a, dict) and all(a.get(key) == b[key] for key in keys) for a, b in zip(theirs, ours, strict=True)
    )


def _counts(report: Report) -> Iterator[str]:
    have = Counter(check.status for check in report["checks"])
    said = {name: number for name, number in report["counts"].items() if number}
    if dict(have) != said:
        yield f"the counts do not add up: they say {said}, the checks are {dict(have)}"
    if not math.isfinite(report["seconds"]) or report["seconds"] < 0:
        yield f"seconds is {report['seconds']}"


def _files(package: Path, report: Report) -> Iterator[str]:
    """Every file the report names is in the package and can be read; the statement is the report's."""
    for check in report["checks"]:
        if check.case_file:
            yield from _case(package, check)
    yield from _strays(package, report)
    yield from _plans(package, report)
    try:
        text = (package / STATEMENT).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"{STATEMENT} cannot be read: {error}"
        return
    plain = {**report, "checks": [check.to_json() for check in report["checks"]]}
    if text != statement_text(plain):
        yield f"{STATEMENT} is not the report's"


def _plans(package: Path, report: Report) -> Iterator[str]:
    """Every plan can be read and belongs to the report; what ran end to end is what its own plan says."""
    ran = {one["plan"]: one for one in report["end_to_end"] if one.get("plan", PLAN) != PLAN}
    for name in sorted({PLAN, *ran}):
        try:
            plan = load_plan(package / Path(name).name)
        except InputError as error:
            yield str(error)
            continue
        if name in ran and {tuple(pair) for pair in ran[name]["ran"]} != pairs_in(plan):
            yield f"end to end, {run_name(ran[name])}: what ran is not what {name} says"
    for path in sorted(package.glob("plan-*.json")):
        if path.name not in ran:
            yield f"{path.name} belongs to no end-to-end check"


def _strays(package: Path, report: Report) -> Iterator[str]:
    """Files in `cases/` that no check names."""
    named, folder = {Path(check.case_file).name for check in report["checks"] if check.case_file}, package / CASES
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in named:
            yield f"{CASES}/{path.name} belongs to no check"


def _case(package: Path, check: CheckResult) -> Iterator[str]:
    path = package / check.case_file
    if not path.resolve().is_relative_to(package.resolve()):
        yield f"{check.case_file} lies outside the package"
        return
    try:
        case = load_case(path)
    except InputError as error:
        yield str(error)
        return
    if case.op != check.op:
        yield f"{check.case_file} is a case of {case.op}, not of {check.op}"
