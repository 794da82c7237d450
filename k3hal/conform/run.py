"""Runs a selection's checks with every available provider and writes the package."""

from __future__ import annotations

import datetime
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from k3hal.conform.end_to_end import END_TO_END_TIMEOUT, EndToEnd, end_to_end_isolated
from k3hal.conform.environment import device_json, statement, variables, versions
from k3hal.conform.levels import dtypes_measured, level_rows, overall
from k3hal.conform.measure import Measured, measure_isolated
from k3hal.conform.models import MODELS, QUICK
from k3hal.conform.must_pass import must_pass
from k3hal.conform.package import (
    CASES,
    PLAN,
    SCHEMA,
    new_package,
    plan_name,
    refuse_what_is_no_package,
    write_report,
)
from k3hal.conform.plans import example_plan
from k3hal.conform.policy import policy_classes, policy_hash
from k3hal.conform.pool import Deaths, Lane, Limits, Outcome
from k3hal.conform.processes import Processes
from k3hal.conform.result import RESULT_STATUSES, CheckResult
from k3hal.conform.selection import EVERYTHING, Candidate, Selection, candidates, registry_with
from k3hal.conform.slices import joined, slices
from k3hal.conform.source_state import source_root
from k3hal.conform.sources import source_hash
from k3hal.conform.vendor_packages import vendor_packages
from k3hal.conform.waivers import apply_waivers, read_waivers
from k3hal.conform.worker import Task
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.emulated import EMULATED
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import Registry

Note = Callable[[int, int, str], None]
"""Told of checks done, checks in all, and the operator in hand."""


@dataclass(frozen=True, slots=True)
class How:
    """How a selection is run: `jobs` processes (0: as many as suit the device), time limits, backend modules to
    register besides those every process finds, whether to measure speed (for E5), the file of waivers, seconds after
    which what has not been judged counts as a timeout, and whether to run the end-to-end check (None: where all
    operators are judged, and no plugins)."""

    jobs: int = 0
    limits: Limits = field(default_factory=Limits)
    plugins: tuple[str, ...] = ()
    bench: bool = False
    waivers: Path | None = None
    limit: float = math.inf
    end_to_end: bool | None = None


def expectations(vendor: str) -> Path | None:
    """The checkout's waivers for a vendor, where there are any."""
    root = source_root()
    path = root / "ci" / "expectations" / f"{vendor}.toml" if root else None
    return path if path and path.exists() else None


def run(selection: Selection, out: Path, how: How, note: Note) -> dict[str, Any]:
    """Judge, write the package to `out` and return its report.

    Raises `InputError` where `out` is something else or the waivers are malformed, before anything is run.
    """
    begun, said = time.perf_counter(), statement()
    refuse_what_is_no_package(out)
    waivers = read_waivers(how.waivers) if how.waivers else []
    registry = registry_with(how.plugins)
    device = probe(selection.device)
    ops = selection.operators()
    found = {op: candidates(op, selection.checks(op), device, registry, selection.backend) for op in ops}
    with new_package(out) as folder:
        outcomes, ends = _run_all(selection, found, folder / CASES, how, note)
        results = [result for op in ops for result in outcomes[op].results]
        whole = not selection.quick and selection.backend is None
        results, waived = apply_waivers(results, waivers, ops, _today(), whole)
        measured = _measured(selection, found, ends, how, begun + how.limit - time.perf_counter())
        report = {
            "schema": SCHEMA,
            "statement": said.to_json(),
            "packages": vendor_packages({c.backend for rows in found.values() for c in rows}),
            "device": device_json(device),
            "versions": versions(device, registry, {c.backend for rows in found.values() for c in rows}),
            "env": variables(os.environ),
            "selection": {name: getattr(selection, name) for name in Selection.__dataclass_fields__},
            "must_pass": must_pass(selection),
            "policy": {"hash": policy_hash(), "classes": policy_classes()},
            "providers": _providers(selection, found, outcomes, results, ends, measured.timings, registry, device),
            "checks": [result.to_json() for result in results],
            "end_to_end": [_end_json(one) for one in ends],
            "waivers": waived,
            "unmeasured": measured.problem,
            "counts": dict(counts(results)),
            "seconds": round(time.perf_counter() - begun, 3),
        }
        plans = {plan_name(one.preset, one.dtype, one.variant): one.plan for one in ends if one.plan}
        write_report(report, {PLAN: example_plan(device, registry), **plans}, folder)
    return report


def counts(results: Iterable[CheckResult]) -> Counter[str]:
    """How many results have each status, from best to worst."""
    number = Counter(result.status for result in results)
    return Counter({status: number[status] for status in RESULT_STATUSES if number[status]})


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _run_all(
    selection: Selection, found: Mapping[str, list[Candidate]], folder: Path, how: How, note: Note
) -> tuple[dict[str, Outcome], list[EndToEnd]]:
    """The outcome of every operator, from lanes that take one operator after another, and the end-to-end checks."""
    cpus = len(os.sched_getaffinity(0))
    # A worker on an accelerator has its own context there, and cores for goldens in fp64: two cores to a worker.
    jobs = how.jobs or min(max(cpus // 2, 1) if selection.large else cpus, 8)
    threads, until = max(1, cpus // jobs), time.monotonic() + how.limit
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    total, parts = 0, dict[str, list[Outcome]]()
    for op in sorted(found, key=lambda op: -_weight(selection, op)):
        mine, parts[op] = tuple(one for one in found[op] if one.available), []
        total += len(mine) * len(selection.checks(op))
        whole = Task(op, selection, mine, str(folder), plugins=how.plugins, threads=threads)
        for task in slices(whole) if mine else ():
            tasks.put(task)
    done, lock, processes, deaths = 0, threading.Lock(), Processes(), Deaths()

    def advance(op: str, more: int) -> None:
        nonlocal done
        with lock:
            done += more
            note(done, total, op)

    def lane() -> None:
        with Lane(how.limits, until, processes, deaths) as mine:
            while True:
                try:
                    task = tasks.get_nowait()
                except queue.Empty:
                    return
                parts[task.op].append(mine.run(task, partial(advance, task.op)))

    with ThreadPoolExecutor(jobs) as pool:
        try:
            run_model = partial(_end_to_end, selection, threads, until, processes)
            ends = [pool.submit(run_model, model) for model in _models(selection, how)]
            for future in [pool.submit(lane) for _ in range(jobs)]:
                future.result()
            outcomes = {op: joined(parts[op], selection.checks(op), found[op]) for op in found}
            return outcomes, [one for future in ends for one in future.result()]
        except BaseException:  # Ctrl-C too: whatever ends the run ends its processes, which may hang
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise


def _weight(selection: Selection, op: str) -> int:
    """Operators with full-size shapes first: they take longest."""
    checks = selection.checks(op)
    return len(checks) + sum({"k3": 1000, "device": 4000}.get(check.shape_class, 0) for check in checks)


def _models(selection: Selection, how: How) -> tuple[str, ...]:
    """The models of the end-to-end check."""
    whole = selection.ops == EVERYTHING and not how.plugins
    if not (whole if how.end_to_end is None else how.end_to_end):
        return ()
    return QUICK if selection.quick else tuple(MODELS)


def _end_to_end(selection: Selection, threads: int, until: float, processes: Processes, model: str) -> list[EndToEnd]:
    ops = f"*={selection.backend}" if selection.backend else None
    left = max(until - time.monotonic(), 0.0)
    timeout = min(left, END_TO_END_TIMEOUT)
    varied = not selection.quick and not selection.backend
    ends = end_to_end_isolated(model, selection.device, ops, threads, processes, timeout=timeout, varied=varied)
    if timeout == END_TO_END_TIMEOUT:
        return ends
    late = "not judged: the time of the whole run was over"
    return [replace(end, problem=late) if end.status == "Timeout" else end for end in ends]


def _measured(
    selection: Selection, found: Mapping[str, list[Candidate]], ends: Iterable[EndToEnd], how: How, left: float
) -> Measured:
    """With `bench`, timings of every available provider, as many as `left` seconds allow. First of the operators that
    the end-to-end checks ran: times of others raise no level."""
    if not how.bench:
        return Measured([])
    ran = {op for end in ends for op, _ in end.ran}
    ordered = sorted(found, key=lambda op: op not in ran)
    names = {op: [one.provider for one in found[op] if one.available] for op in ordered}
    processes = Processes()
    try:
        return measure_isolated(selection, {op: ids for op, ids in names.items() if ids}, how.plugins, processes, left)
    except BaseException:
        processes.stop()
        raise


def _providers(
    selection: Selection,
    found: Mapping[str, list[Candidate]],
    outcomes: Mapping[str, Outcome],
    results: list[CheckResult],
    ends: list[EndToEnd],
    measured: list[dict[str, Any]],
    registry: Registry,
    device: DeviceDescription,
) -> list[dict[str, Any]]:
    hashes = {(p.op, p.id): source_hash(p) for p in registry.providers if p.op in found}
    out = []
    for op, mine in found.items():
        for one in mine:
            own = [r for r in results if (r.op, r.provider) == (op, one.provider)]
            timings = [t for t in measured if (t["op"], t["provider"]) == (op, one.provider)]
            rows = level_rows(
                own,
                quick=selection.quick or EMULATED in device.features,
                end_to_end=dtypes_proven(ends, op, one.provider),
                measured=dtypes_measured(timings),
            )
            entry = {
                "op": op, "provider": one.provider, "backend": one.backend, "arch": device.arch,
                "source_hash": hashes.get((op, one.provider), ""), "level": overall(rows), "levels": rows,
                "refusals": _refusals(selection, op, one), "reference_only": False,
                "not_applicable": sorted(outcomes[op].skipped.get(one.provider, [])), "timings": timings,
            }  # fmt: skip
            out.append(entry)
        if not any(one.available for one in mine):
            nothing = {"source_hash": "", "level": "E0", "levels": [], "refusals": [], "not_applicable": []}
            names = {"op": op, "provider": "reference", "backend": "dispatch", "arch": device.arch}
            out.append({**names, **nothing, "reference_only": True, "timings": []})
    return out


def dtypes_proven(ends: Iterable[Any], op: str, provider: str) -> set[str]:
    """The dtypes in which every end-to-end check that ran the provider passed, and one did."""
    mine = [one for one in ends if (op, provider) in one.ran]
    return {one.dtype for one in mine} - {one.dtype for one in mine if one.status != "Pass"}


def _refusals(selection: Selection, op: str, one: Candidate) -> list[dict[str, Any]]:
    """The provider's No's: the cases of a dtype and phase that share the reasons together."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for case_id, sample in {check.case_id: check.sample for check in selection.checks(op)}.items():
        if case_id in one.refused:
            groups.setdefault((sample.dtype, sample.phase, one.refused[case_id]), []).append(case_id)
    return [
        {"dtype": dtype, "phase": phase, "reasons": list(reasons), "cases": ids}
        for (dtype, phase, reasons), ids in groups.items()
    ]


def _end_json(one: EndToEnd) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in EndToEnd.__dataclass_fields__ if name not in ("plan", "ran")}
    return {
        **fields,
        "ran": [list(pair) for pair in one.ran],
        "plan": plan_name(one.preset, one.dtype, one.variant) if one.plan else PLAN,
    }


def exit_code(report: Mapping[str, Any]) -> int:
    """3 after a crash or a hang, of what measures too, 1 for a failure or a waiver that is wrong, 2 where nothing could
    be judged, else 0."""
    statuses = {check["status"] for check in report["checks"]} | {one["status"] for one in report["end_to_end"]}
    if statuses & {"Crash", "Timeout"} or report.get("unmeasured"):
        return 3
    if "Fail" in statuses or any(waiver["problem"] for waiver in report["waivers"]):
        return 1
    return 0 if statuses & {"Pass", "QualityWarning", "Waived"} else 2
