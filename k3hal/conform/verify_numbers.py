"""Whether every status in a report follows from what the report holds: numbers, caps, peers and problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from k3hal.conform.models import CAPS, MODELS, QUICK, caps_of
from k3hal.conform.package import PLAN, plan_name
from k3hal.conform.pool import FULL_SIZE
from k3hal.conform.result import SAMPLE, CheckResult
from k3hal.conform.selection import Selection
from k3hal.conform.statement import run_name
from k3hal.conform.suite import Check
from k3hal.conform.values import value_differences
from k3hal.conform.variants import DEFAULT
from k3hal.debug.golden import golden
from k3hal.debug.judge import caps_in_force, loosest_caps, status_of
from k3hal.debug.verdict import STATUSES, Status, TensorNumbers, worst
from k3hal.dispatch.registry import get_operator, operator_names
from k3hal.dispatch.tolerance import CLASSES, Comparison, ToleranceClass, loosest, may_judge

_NUMBERS = ("floor", "tensor", "slice", "peak")
_SLACK = 1.001
"""A golden made anew on another machine may differ in its last bits."""


def check_numbers(report: Mapping[str, Any], selection: Selection) -> Iterator[str]:
    """Reasons to reject the checks' and end-to-end checks' statuses, numbers and caps."""
    limits = _Limits(selection, exact=not value_differences(report))
    host = report["device"]["vendor"] == "cpu"
    waivers = {one["id"] for one in report["waivers"]}
    for check in report["checks"]:
        where = f"{check.provider}: {check.case} {check.kind}"
        if not math.isfinite(check.seconds) or check.seconds < 0:
            yield f"{where}: seconds is {check.seconds}"
        if check.op in operator_names():
            yield from (f"{where} is {check.status} {why}" for why in _contradictions(check, host, waivers, limits))
    yield from _ends(report)
    for one in report["providers"]:
        for timing in one.get("timings", ()):
            seconds = timing.get("seconds") if isinstance(timing, dict) else math.nan
            if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
                yield f"{one['provider']} of {one['op']}: a timing's seconds is {seconds}"


def bounded(report: Mapping[str, Any]) -> int:
    """How many outputs have limits above their class's that are only bounded, since no golden here has their values."""
    if not value_differences(report):
        return 0
    return sum(
        check.op in operator_names() and check.kind == SAMPLE and check.shape_class not in FULL_SIZE and _raised(tensor)
        for check in report["checks"]
        for tensor in check.tensors
    )


def _raised(tensor: TensorNumbers) -> bool:
    said = _said(tensor)
    return said is not None and tensor.tolerance in CLASSES and bool(_above(said, CLASSES[tensor.tolerance]))


def _said(tensor: TensorNumbers) -> ToleranceClass | None:
    """The limits an entry holds; None for one that is older than that."""
    if tensor.caps is None or tensor.floor is None:
        return None
    return ToleranceClass(tensor.floor, *tensor.caps, exact=loosest(tensor.tolerance).exact)


def _contradictions(check: CheckResult, host: bool, waivers: set[str], limits: _Limits) -> Iterator[str]:
    if check.status in ("NotSupported", "Crash", "Timeout"):
        if not check.problems:
            yield "and says no reason"
        return
    statuses: list[Status] = ["Fail"] if check.problems else []
    for tensor in check.tensors:
        status, problem = _tensor(check, tensor, host, limits)
        statuses.append(status)
        if problem:
            yield f"with {tensor.name} {problem}"
    proven = worst(statuses)
    if check.status == "Waived":
        if check.waiver not in waivers:
            yield "by a waiver that is not listed"
        return
    if check.ok and check.kind == SAMPLE and not check.tensors:
        yield "with no output judged"
    if check.status != proven:
        yield f"and its outputs and problems make it {proven}"


def _tensor(check: CheckResult, tensor: TensorNumbers, host: bool, limits: _Limits) -> tuple[Status, str]:
    """The status that an output's numbers have, and what is wrong with the entry; nothing for one that is right."""
    declared = get_operator(check.op).outputs.get(tensor.name)
    if declared is None or tensor.tolerance not in CLASSES or not may_judge(declared, tensor.tolerance):
        return tensor.status, f"judged by {tensor.tolerance}, which is not its class"
    problem, caps = limits.of(check, tensor)
    if problem:
        return tensor.status, problem
    alone = host and check.kind == SAMPLE and tensor.peer is None
    got = Comparison(tensor.tensor, tensor.slice, tensor.peak)
    # Without its floor a ratio cannot be told; caps as loose as they get still say what is out of tolerance.
    old = tensor.caps is None
    status, why = status_of(got, caps, None if old else tensor.peer, alone=alone and not old)
    if tensor.status == "Fail" and tensor.problem:
        return "Fail", ""  # also for what no number says: a dtype, a shape
    if old and tensor.status == "QualityWarning" and status == "Pass":
        return "QualityWarning", ""
    if status != tensor.status:
        return status, f"out of tolerance: {why}" if status == "Fail" else f"{tensor.status}, its numbers say {status}"
    return status, "" if bool(tensor.problem) == (status != "Pass") else "whose problem contradicts its status"


class _Limits:
    """The caps that may judge an output. Those above their class's are compared with a golden made anew, once a case.

    Without `exact` values here are not those of the report: the golden gives its shapes, and the caps are what rounding
    explains at most. So are those of full-size cases, whose golden is too much, and of invariants, which may make other
    calls of a case; of these the shapes are not known either.
    """

    def __init__(self, selection: Selection, exact: bool) -> None:
        self._selection, self._exact = selection, exact
        self._checks: dict[str, dict[str, Check]] = {}
        self._case: tuple[str, dict[str, ToleranceClass]] = ("", {})

    def of(self, check: CheckResult, tensor: TensorNumbers) -> tuple[str, ToleranceClass]:
        """What is wrong with the caps an entry holds, and the caps to judge it by."""
        most, own, said = loosest(tensor.tolerance), CLASSES[tensor.tolerance], _said(tensor)
        if said is None:
            return "", most
        if said.floor < own.floor:
            return f"judged with floor {said.floor:.3g}, below its class's", said
        if _above(said, own) and check.kind == SAMPLE and check.shape_class not in FULL_SIZE:
            most = self._anew(check).get(tensor.name, own)
        if name := _above(said, most):
            return f"judged with {name} {getattr(said, name):.3g}, looser than the policy's", said
        return "", said

    def _anew(self, result: CheckResult) -> dict[str, ToleranceClass]:
        if self._case[0] != result.case:
            mine = self._checks.setdefault(result.op, {})
            if not mine:
                mine.update({one.case_id: one for one in self._selection.checks(result.op)})
            caps = _caps(mine[result.case], self._exact) if result.case in mine else {}
            self._case = (result.case, caps)
        return self._case[1]


def _caps(check: Check, exact: bool) -> dict[str, ToleranceClass]:
    args, operator = check.case().args, check.operator
    expected = golden(operator, args)
    if exact:
        return {name: caps_in_force(operator, args, name, expected)[1] for name in expected}
    return {name: loosest_caps(operator, args, name, expected) for name in expected}


def _above(said: ToleranceClass, most: ToleranceClass) -> str:
    """The first number in which caps are looser than others."""
    return next((name for name in _NUMBERS if getattr(said, name) > getattr(most, name) * _SLACK), "")


def _ends(report: Mapping[str, Any]) -> Iterator[str]:
    """Every end-to-end check is of a model and a dtype that there are, once, with the plan of its own."""
    runs, models = set[tuple[str, str, str]](), QUICK if report["selection"]["quick"] else tuple(MODELS)
    for one in report["end_to_end"]:
        variant = one.get("variant", DEFAULT)
        where, run = f"end to end, {run_name(one)}", (one["preset"], one["dtype"], variant)
        if one["preset"] not in models or one["dtype"] not in CAPS:
            yield f"{where}: expected one of {', '.join(models)} in one of {', '.join(CAPS)}"
        elif run in runs:
            yield f"{where}: there are two results"
        elif one.get("plan", PLAN) not in (PLAN, plan_name(*run)):
            yield f"{where}: its plan is {one['plan']}, expected {plan_name(*run)}"
        else:
            yield from _end(one, where)
        runs.add(run)


def _end(one: Mapping[str, Any], where: str) -> Iterator[str]:
    """An end-to-end check that passed is within its caps; one that did not has a reason."""
    where = f"{where}: {one['status']}"
    if one["status"] not in STATUSES:
        yield f"{where}, expected one of {', '.join(STATUSES)}"
    numbers = {name: one[name] for name in ("top1", "kl_mean", "kl_max", "rms")}
    most = {"top1": 1.0}
    bad = (n for n, v in numbers.items() if v is not None and not (0 <= v < math.inf and v <= most.get(n, v)))
    if odd := next(bad, ""):
        yield f"{where}, {odd} is {numbers[odd]}"
    if one["status"] != "Pass":
        if not one["problem"]:
            yield f"{where}, and says no reason"
        return
    if one.get("plan", PLAN) == PLAN and "variant" in one:
        yield f"{where}, without its plan"
    caps = caps_of(one["preset"], one["dtype"])
    inside = all(
        value is not None and (value >= caps.top1 if name == "top1" else value <= getattr(caps, name))
        for name, value in numbers.items()
    )
    if not inside or one["problem"]:
        yield f"{where}, and its numbers do not make it so"
