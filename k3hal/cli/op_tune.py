"""`k3hal op tune`: which tactic of each provider is right and fastest here, proven before it is timed."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_cases import CaseFiles, DTypes, PresentDevice, present
from k3hal.cli.output import print_json
from k3hal.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3hal.debug.case import Case
    from k3hal.debug.tune import Result
    from k3hal.dispatch.device import DeviceDescription
    from k3hal.dispatch.provider import Provider


def tune(
    op: Annotated[str, typer.Argument(metavar="GLOB", help='Operators: kda_chunk, "kda_*"; default: all.')] = "*",
    provider: Annotated[
        str | None, typer.Option("--provider", metavar="P", help="Only this one: an id, name or backend.")
    ] = None,
    case: CaseFiles = None,
    dtype: DTypes = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For one tactic on all cases; more is a hang.")
    ] = 60.0,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time spent on timing one tactic for one class of calls.")
    ] = 0.5,
    show: Annotated[bool, typer.Option("--list", help="Show what was found before; tune nothing.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what was found for these operators.")] = False,
    device: PresentDevice = "auto",
    as_json: Json = False,
) -> int:
    """Prove every tactic of the operators' providers right, then time it; the fastest right one is taken from now on.

    A tactic runs in a process of its own, on every sample and on the cases given, with poisoned outputs. One that is
    wrong, crashes or hangs is never timed and never taken, and its case is kept. With --case only the classes of
    calls of those files are decided, else those of the samples. Exits with 1 if a default tactic is wrong itself.
    """
    from k3hal.dispatch.registry import operator_names
    from k3hal.dispatch.tactic_file import update_tactics
    from k3hal.dispatch.words import nearest

    ops = [name for name in operator_names() if fnmatchcase(name, op)]
    if not ops:
        raise UsageError(f"no operator matches {op!r}", hint=nearest(op, operator_names()))
    if timeout <= 0 or seconds <= 0:
        raise UsageError("--timeout and --seconds are above 0")
    if show or clear:
        return _forget(ops, as_json) if clear else _list(ops, as_json)
    machine = present(device)
    work = _work(ops, provider, machine, case, dtype)
    update_tactics(lambda cache: cache)  # what could not be kept is not worth finding
    results = _tune(work, machine, timeout, seconds, as_json)
    if as_json:
        print_json("k3hal.op_tune/1", {"device": machine.id, "results": [asdict(result) for result in results]})
    return 1 if any(result.failed for result in results) else 0


def _work(
    ops: Sequence[str],
    name: str | None,
    machine: DeviceDescription,
    files: Sequence[Path] | None,
    dtypes: Sequence[str] | None,
) -> list[tuple[Provider, list[Case], list[Case]]]:
    """Providers with tactics, the cases to prove them on, and those whose classes of calls to decide."""
    from k3hal.debug.case import sample_cases
    from k3hal.debug.case_file import load_case
    from k3hal.dispatch.call import Call
    from k3hal.dispatch.registry import default_registry, get_operator
    from k3hal.dispatch.words import nearest

    given = [(file, load_case(file)) for file in files or ()]
    for file, case in given:
        if case.op not in ops:
            raise UsageError(f"{file} is a case of {case.op}, which is not to be tuned")
    registry, out = default_registry(), []
    theirs = [p for op in ops for p in registry.of(op)]
    if name is not None and not any(name in (p.id, p.name, p.backend) for p in theirs):
        hint = nearest(name, {word for p in theirs for word in (p.id, p.name)}, always_list=True)
        raise UsageError(f"--provider: no provider here is called {name!r}", hint=hint)
    for op in sorted({case.op for _, case in given} or ops):
        found = [p for p in registry.of(op) if p.tactics is not None and name in (None, p.id, p.name, p.backend)]
        found = [p for p in found if not p.needs.unmet(Call(op, machine, (*p.needs.dtypes, "bfloat16")[0]))]
        if not found:
            continue
        mine = [case for _, case in given if case.op == op and (not dtypes or case.dtype in dtypes)]
        samples = list(sample_cases(get_operator(op), dtypes=dtypes or ()))
        out += [(p, [*samples, *mine], mine or samples) for p in found]
    if not out:
        raise UnsupportedError(f"{', '.join(ops) if len(ops) < 4 else 'these operators'}: no provider here has tactics")
    return out


def _tune(
    work: Sequence[tuple[Provider, list[Case], list[Case]]],
    machine: DeviceDescription,
    timeout: float,
    seconds: float,
    quiet: bool,
) -> list[Result]:
    from k3hal.debug.forks import Forks
    from k3hal.debug.tune import Limits, Tuner

    results = []
    with Forks() as forks:
        tuner = Tuner(machine, forks, Limits(timeout, seconds), lambda text: typer.echo(text, err=True))
        for provider, cases, timed in work:
            for result in tuner.tune(provider, cases, timed):
                results.append(result)
                if not quiet:
                    _print(result)
    return results


def _print(result: Result) -> None:
    typer.echo(f"{result.op}  {result.provider}  {result.dtype}")
    if result.failed:
        typer.echo(f"    {result.failed}")
    for entry in result.tuned:
        typer.echo(f"    {_entry(entry.dims, entry.phase)} -> {entry.tactic}{_gain(entry)}")
        for timed in result.timed:
            if (timed.phase, timed.dims) == (entry.phase, entry.dims):
                was = timed.result
                times = f"{1e6 * was.seconds:.1f} us, default {1e6 * was.default_seconds:.1f} us"
                gain = f"saves {100 * was.gain:.1f} %, noise {100 * was.noise:.1f} %"
                typer.echo(f"        {timed.tactic:<14} {times}, {gain}")
    for kind, rejections in (("rejected", result.new), ("rejected before", result.known)):
        for rejection in rejections:
            typer.echo(f"    {kind}: {rejection.tactic}, {rejection.reason}\n        case: {rejection.case}")


def _entry(dims: Any, phase: str) -> str:
    return f"{phase}: " + (", ".join(f"{name}={value}" for name, value in dims.items()) or "no dims")


def _gain(entry: Any) -> str:
    if not entry.gain:
        return f"  (no other is faster; {entry.cases} cases)"
    return f"  ({100 * entry.gain:.1f} % faster than default, noise {100 * entry.noise:.1f} %; {entry.cases} cases)"


def _list(ops: Sequence[str], as_json: bool) -> int:
    """What the cache holds for these operators, and whether it still counts."""
    from k3hal.dispatch.probe import present_devices
    from k3hal.dispatch.registry import default_registry
    from k3hal.dispatch.tactic_file import load_tactics, tactics_file
    from k3hal.dispatch.tactics import device_name, fingerprint

    cache, registry = load_tactics(), default_registry()
    providers = {(p.op, p.id): p for p in registry.providers}
    devices = {device_name(device): device for device in present_devices()}

    def void(entry: Any) -> str:
        provider, machine = providers.get((entry.op, entry.provider)), devices.get(entry.made_for.device)
        if provider is None or machine is None:
            return "no such provider" if provider is None else "for another machine"
        changed = entry.made_for.changed(fingerprint(provider, machine))
        return f"void, {changed} changed" if changed else ""

    tuned = [asdict(e) | {"void": void(e)} for e in cache.tuned if e.op in ops]
    rejected = [asdict(e) | {"void": void(e)} for e in cache.rejected if e.op in ops]
    if as_json:
        print_json("k3hal.op_tune/1", {"file": str(tactics_file()), "tuned": tuned, "rejected": rejected})
        return 0
    for row in tuned:
        where = f"{row['op']}  {row['provider']}  {row['dtype']}  {_entry(row['dims'], row['phase'])}"
        typer.echo(f"{where} -> {row['tactic']}" + (f"  ({row['void']})" if row["void"] else ""))
    for row in rejected:
        typer.echo(f"{row['op']}  {row['provider']}:{row['tactic']}  {row['dtype']}  rejected, {row['reason']}"
                   + (f"  ({row['void']})" if row["void"] else ""))  # fmt: skip
    if not tuned and not rejected:
        typer.echo("nothing is tuned")
    return 0


def _forget(ops: Sequence[str], as_json: bool) -> int:
    """Leave the other operators' findings; where these are all there are, or the file is malformed, it goes."""
    from k3hal.dispatch.registry import operator_names
    from k3hal.dispatch.tactic_file import tactics_file, tactics_folder, update_tactics
    from k3hal.dispatch.tactics import TacticCache

    if len(ops) == len(operator_names()):
        shutil.rmtree(tactics_folder(), ignore_errors=True)
    else:

        def without(cache: TacticCache) -> TacticCache:
            for rejection in cache.rejected:
                if rejection.op in ops and rejection.case:
                    Path(rejection.case).unlink(missing_ok=True)
            return TacticCache(
                tuple(e for e in cache.tuned if e.op not in ops), tuple(e for e in cache.rejected if e.op not in ops)
            )

        update_tactics(without)
    if as_json:
        print_json("k3hal.op_tune/1", {"file": str(tactics_file()), "cleared": list(ops)})
    else:
        typer.echo(f"forgotten: {len(ops)} operators in {tactics_file()}")
    return 0
