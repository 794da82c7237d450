"""`k3hal op explain`: what every provider answers for exactly one class of calls, and what the policy takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import DType, Json, Ops, Plan
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k3hal.dispatch.call import Call
    from k3hal.dispatch.explain import Candidate, Explanation
    from k3hal.dispatch.mxfp4 import Mxfp4
    from k3hal.dispatch.select import Decision


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator's name.")],
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda:1, rocm, npu, or a described one (mi355x)."),
    ] = "auto",
    dtype: DType = None,
    phase: Annotated[
        str | None, typer.Option("--phase", metavar="PHASE", help="prefill, decode, verify or any.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", "--dims", metavar="NAME=VALUE,...", help="Put over the full-size model's dims."),
    ] = None,
    case: Annotated[Path | None, typer.Option("--case", metavar="FILE", help="Explain a .k3case's call.")] = None,
    packages: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE==VERSION", help="As if this release were installed; may be repeated."),
    ] = None,
    ops: Ops = None,
    plan: Plan = None,
    as_json: Json = False,
) -> int:
    """Show what every provider of an operator answers, what the policy takes and why.

    Exits with 2 if the policy refuses every way to run it.
    """
    from k3hal.dispatch.assemble import build_selector
    from k3hal.dispatch.explain import explain as explain_call
    from k3hal.dispatch.plan_file import load_plan

    selector = build_selector(ops, "warn")
    if plan and selector.overrides:
        raise UsageError("--plan pins every provider; it cannot be combined with --ops or K3HAL_OPS")
    call = _with_packages(_call(op, device, case, shape or [], phase, dtype), packages or [])
    found = explain_call(call, selector, load_plan(plan) if plan else None)
    if as_json:
        print_json("k3hal.op_explain/1", _explanation_json(found))
    else:
        typer.echo("\n".join(_lines(found)))
    return 2 if found.decision is None else 0


def _call(op: str, device: str, case: Path | None, shape: list[str], phase: str | None, dtype: str | None) -> Call:
    from k3hal.cli.op_calls import activation_dtype, call_of
    from k3hal.dispatch.probe import resolve_device
    from k3hal.dispatch.registry import get_operator

    operator, machine = get_operator(op), resolve_device(device)
    if case is None:
        return call_of(operator, machine, activation_dtype(dtype), phase, shape)
    from k3hal.debug.case_file import load_case

    if shape or phase or dtype:
        raise UsageError("--case has a shape, a phase and a dtype of its own", hint="leave out the other flags")
    loaded = load_case(case)
    if loaded.op != op:
        raise UsageError(f"{case} is a case of {loaded.op}, not of {op}")
    return loaded.call(machine)


def _with_packages(call: Call, given: list[str]) -> Call:
    """The call on a machine that has these releases too, of which nothing is loaded then."""
    from collections import ChainMap
    from dataclasses import replace

    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

    found: dict[str, str] = {}
    for text in given:
        name, equal, version = text.partition("==")
        try:
            found[canonicalize_name(name.strip(), validate=True)] = str(Version(version.strip()))
        except ValueError as error:
            what = f"{version!r} is no version" if isinstance(error, InvalidVersion) and equal else "not understood"
            raise UsageError(f"--with {text!r}: {what}", hint="like --with flashinfer-python==0.7.4") from error
    if not found:
        return call
    _refuse_unknown(found, {*call.device.packages, "torch", "triton"})
    packages = ChainMap(found, call.device.packages)  # type: ignore[arg-type]
    return replace(call, device=replace(call.device, packages=packages, present=False))


def _refuse_unknown(given: Iterable[str], present: set[str]) -> None:
    """Raise `UsageError` for a package that changes no answer: a library's other name, or a typo."""
    from packaging.utils import canonicalize_name

    from k3hal.dispatch.registry import default_registry
    from k3hal.dispatch.words import nearest

    asked = {
        canonicalize_name(name)
        for provider in default_registry().providers
        for packages in (provider.needs.packages, *(fault.packages for fault in provider.faults))
        for name in packages
    }
    for name in given:
        if name not in asked | present:
            raise UsageError(f"--with: no provider asks for a package {name!r}", hint=nearest(name, sorted(asked)))


def _explanation_json(found: Explanation) -> dict[str, Any]:
    call = found.call
    return {
        "op": call.op,
        "device": call.device.id,
        "dtype": call.dtype,
        "phase": call.phase,
        "dims": dict(call.dims),
        "considered": [_candidate_json(candidate) for candidate in found.candidates],
        "decision": _decision_json(found.decision) if found.decision else None,
        "refusal": found.refusal.message if found.refusal else None,
        "level": found.level,
        "mxfp4": {"path": found.mxfp4.path, "why": list(found.mxfp4.why)} if found.mxfp4 else None,
        "parts": {name: _explanation_json(part) for name, part in found.parts.items()},
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "provider": candidate.answer.provider,
        "accepted": candidate.answer.accepted,
        "reasons": list(candidate.answer.reasons),
        "priority": candidate.priority,
        "auto": candidate.auto,
        "level": candidate.level,
        "mxfp4": candidate.mxfp4,
    }


def _decision_json(decision: Decision) -> dict[str, Any]:
    from k3hal.dispatch.plan_file import reasons

    return {
        "provider": decision.provider,
        "backend": decision.backend,
        "policy": decision.policy,
        "composed": decision.composed,
        "reference": decision.reference,
        "reasons": reasons(decision),
        "tactic": decision.tactic if decision.tactic_source else None,
        "tactic_source": decision.tactic_source,
        "parts": {op: _decision_json(part) for op, part in decision.parts.items()},
    }


def _lines(found: Explanation, depth: int = 0) -> Iterator[str]:
    from k3hal.dispatch.registry import get_operator

    call, pad = found.call, "    " * depth
    shown = ", ".join(f"{name}={value}" for name, value in call.dims.items()) or "no dims"
    yield f"{pad}{call.op}  {get_operator(call.op).summary}"
    yield f"{pad}on {call.device.id}, {call.dtype}, {call.phase}: {shown}"
    for candidate in found.candidates:
        yield f"{pad}    {_candidate_line(candidate)}".rstrip()
    if not found.candidates:
        yield f"{pad}    no provider is registered"
    if found.decision is None:
        yield f"{pad}{call.op} -> nothing: {found.refusal.message if found.refusal else ''}"
        return
    yield f"{pad}{call.op} -> {found.decision.provider}  ({found.decision.policy}; evidence {found.level})"
    if found.decision.tactic_source:
        yield f"{pad}    tactic {found.decision.tactic}: {found.decision.tactic_source}"
    if found.mxfp4:
        yield f"{pad}    MXFP4: {_mxfp4_line(found.mxfp4)}"
    if found.parts:
        yield f"{pad}    {'composed of' if found.decision.composed else 'could be composed of'}"
    for part in found.parts.values():
        yield from _lines(part, depth + 2)


def _candidate_line(candidate: Candidate) -> str:
    notes = [*candidate.answer.reasons, *(() if candidate.auto else ("chosen only by name",))]
    verdict = "Yes" if candidate.answer.accepted else "No "
    return f"{candidate.answer.provider:<24} {verdict} {'; '.join(notes)}"


def _mxfp4_line(path: Mxfp4) -> str:
    from k3hal.dispatch.mxfp4 import TEXT

    return f"{TEXT[path.path] if path.path else 'path not known'} ({'; '.join(path.why)})"
