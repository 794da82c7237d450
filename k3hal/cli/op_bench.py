"""`k3hal op bench`: how fast providers are, against this machine's own ceilings; never for an unverified output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from k3hal.cli.common import Json, Save
from k3hal.cli.conform import EXIT_INTERRUPTED, EXIT_TERMINATED
from k3hal.cli.op_cases import CaseFiles, DTypes, SampleNames, Seed, Tags
from k3hal.cli.output import print_json
from k3hal.dispatch.call import Call
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.debug.bench import Timing
    from k3hal.debug.bench_run import BenchResult
    from k3hal.debug.ceilings import Ceilings
    from k3hal.debug.rotation import Cache
    from k3hal.dispatch.device import DeviceDescription
    from k3hal.dispatch.operator import Operator, Sample


ModelOnly = Annotated[
    bool, typer.Option("--model-only", help="Run nothing: print floors from the chip's published limits.")
]
AnyDevice = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, rocm, npu; with --model-only also like mi355x."
    ),
]


def bench(
    ctx: typer.Context,
    op: Annotated[str, typer.Argument(metavar="OP", help="Names or globs of operators: 'kda_*,mla_decode'.")],
    provider: Annotated[
        str, typer.Option("--provider", metavar="P[,Q]", help="Default: every provider that may run on the device.")
    ] = "",
    sample: SampleNames = None,
    tag: Tags = None,
    dtype: DTypes = None,
    case: CaseFiles = None,
    seed: Seed = 0,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="To spend on each timing.")] = 0.5,
    cache: Annotated[
        str, typer.Option("--cache", metavar="cold|warm", help="Default: cold on an accelerator, warm on a CPU.")
    ] = "",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="For one provider on one case, of several operators.")
    ] = 180.0,
    limit: Annotated[
        float, typer.Option("--limit", metavar="S", help="Begin nothing after that, of several operators.")
    ] = 86_400.0,
    failing: Annotated[
        bool, typer.Option("--failing", help="Time what fails its verification too; its row says so.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a roofline as FILE.png and FILE.svg.")
    ] = None,
    model_only: ModelOnly = False,
    save: Save = None,
    device: AnyDevice = "auto",
    as_json: Json = False,
) -> int:
    """Time providers of OP: each case is verified first, and only what passes is timed unless --failing is given.

    Several operators run in a process of their own, which a crash or a hang does not end. Exits with 1 if a provider
    failed its verification, 2 if nothing ran, 3 after a crash or a hang. Ctrl-C and SIGTERM end it: what was timed is
    shown and saved, and it exits with 130 or 143.
    """
    if model_only:
        return _model_only(ctx, op, (sample, tag, dtype), save or [], device, as_json)
    from k3hal.bench.save import check_targets
    from k3hal.debug.bench_run import BenchResult
    from k3hal.debug.verdict import exit_code

    if not 0 < seconds <= 600:
        raise UsageError(f"--seconds is {seconds:g}", hint="above 0, at most 600")
    check_targets(save or [])
    machine, operators = _here(device), _operators(op)
    how = _How(machine, seconds, _cache(cache, machine), seed, limit, timeout, failing, not as_json)
    result = BenchResult([], {}, [])
    stopped = _until_stopped(
        partial(_bench_files, operators, case, provider, how, result)
        if case
        else partial(_bench_samples, operators, (sample, tag, dtype), provider, how, result)
    )
    if result.timings or not stopped:
        # An earlier report is not given up for an empty one.
        _kept(op, machine, result, plot, save or [], as_json)
    return stopped or exit_code([timing.verdict.status for timing in result.timings])


def _kept(
    op: str, machine: DeviceDescription, result: BenchResult, plot: Path | None, save: Sequence[Path], as_json: bool
) -> None:
    from k3hal.bench.operators import SCHEMA, operators_report
    from k3hal.bench.save import save as keep
    from k3hal.debug.roofline import save_roofline

    title = f"{op} on {machine.title or machine.id}"
    files = save_roofline(result.timings, result.ceilings, title, plot) if plot else []
    report = operators_report(op, machine, result.ceilings, result.timings, result.left_out)
    for target in save:
        keep({"schema": SCHEMA, **report}, target)
    if as_json:
        print_json(SCHEMA, {**report, "plots": [str(f) for f in files]})


def _until_stopped(work: Callable[[], object]) -> int:
    """The exit code of who was told to stop, 0 of who came to an end."""
    from k3hal.conform.processes import Terminated, terminable

    try:
        with terminable():
            work()
    except KeyboardInterrupt as stop:
        typer.echo("interrupted: what was timed is kept", err=True)
        return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED
    return 0


def _here(device: str) -> DeviceDescription:
    """The device of this machine. Raises `UsageError` for one that is only described, and names the flag for it."""
    from k3hal.dispatch.probe import resolve_device

    machine = resolve_device(device)
    if not machine.present:
        raise UsageError(
            f"{device!r} describes a machine that is not here",
            hint="nothing can be timed on it; --model-only prints floors from its published limits",
        )
    return machine


def _model_only(
    ctx: typer.Context,
    op: str,
    filters: Sequence[list[str] | None],
    save: Sequence[Path],
    device: str,
    as_json: bool,
) -> int:
    from k3hal.cli.op_bench_model import bench_model, check_flags
    from k3hal.dispatch.probe import resolve_device

    check_flags(ctx)
    machine, operators = resolve_device(device), _operators(op)
    samples = [(one, _samples(one, machine, *filters, alone=len(operators) == 1)) for one in operators]
    return bench_model(op, machine, samples, save, as_json)


@dataclass(frozen=True, slots=True)
class _How:
    device: DeviceDescription
    seconds: float
    cache: Cache
    seed: int
    limit: float
    timeout: float
    failing: bool
    shown: bool

    def note(self, what: Timing | Ceilings) -> None:
        """Print what has just been measured, unless JSON will."""
        if self.shown:
            typer.echo(_ceilings_line(what, self.device) if hasattr(what, "threads") else _line(cast("Timing", what)))


def _operators(op: str) -> list[Operator]:
    """The operators of names and globs. Raises `UsageError` for one that there is none of."""
    from k3hal.dispatch.registry import get_operator, operator_names

    found: dict[str, Operator] = {}
    for word in op.split(","):
        mine = [name for name in operator_names() if fnmatchcase(name, word)] if set("*?[") & set(word) else [word]
        if not mine:
            raise UsageError(f"no operator matches {word!r}", hint="`k3hal op list` shows them")
        found |= {name: get_operator(name) for name in mine}
    return list(found.values())


def _cache(asked: str, machine: DeviceDescription) -> Cache:
    if asked not in ("", "cold", "warm"):
        raise UsageError(f"--cache is {asked!r}", hint="cold or warm")
    if machine.vendor == "cpu" and asked == "cold":
        raise UsageError("--cache cold needs an accelerator", hint="a CPU is timed with warm caches")
    return "warm" if machine.vendor == "cpu" or asked == "warm" else "cold"


def _bench_samples(
    operators: Sequence[Operator],
    filters: Sequence[list[str] | None],
    provider: str,
    how: _How,
    into: BenchResult,
) -> None:
    from k3hal.debug.bench_run import BenchJob, run_here, run_isolated

    if len(operators) > 1:
        _checked(provider, operators)
    keys = []
    for operator in operators:
        samples = _samples(operator, how.device, *filters, alone=len(operators) == 1)
        calls = [Call(operator.name, how.device, s.dtype, s.phase, s.dims) for s in samples]
        names = _providers(operator.name, provider, how.device, calls, alone=len(operators) == 1)
        for one, call in zip(samples, calls, strict=True):
            tuned = [] if provider else _tuned(call)
            keys += [(operator.name, one.name, one.dtype, name) for name in (*names, *tuned)]
    job = BenchJob(tuple(keys), how.device.id, how.seconds, how.cache, how.seed, how.limit, how.failing)
    if len(operators) == 1:
        run_here(job, how.note, into)
    else:
        run_isolated(job, how.timeout, how.note, into)


def _samples(
    operator: Operator,
    machine: DeviceDescription,
    names: list[str] | None,
    tags: list[str] | None,
    dtypes: list[str] | None,
    *,
    alone: bool,
) -> list[Sample]:
    """The samples that the flags name; without flags on an accelerator those for timing, else full-size ones, else all.

    Raises `UsageError` where there is none, unless the operator is one of several.
    """
    from k3hal.cli.op_cases import no_sample
    from k3hal.debug.case import samples_of

    free = not names and not tags and machine.vendor != "cpu"
    for wanted in (["bench"], ["k3", "device"], []) if free else [tags or []]:
        found = list(samples_of(operator, names=names or (), tags=wanted, dtypes=dtypes or ()))
        if found:
            return found
    if alone:
        raise no_sample(operator)
    return []


def _providers(op: str, asked: str, machine: DeviceDescription, calls: Sequence[Call], *, alone: bool) -> list[str]:
    """Those asked for, or the providers that selection may take and that run any of the calls, and on a CPU the
    reference beside them. Raises `UsageError` for a name that is none; one of several operators takes its own names."""
    from k3hal.dispatch.overrides import Override, parse_overrides
    from k3hal.dispatch.provider import RESERVED
    from k3hal.dispatch.registry import default_registry

    registry = default_registry()
    if not asked:
        mine = [p for p in registry.of(op) if registry.backends[p.backend].auto]
        found = [p.id for p in mine if any(p.answer(call) for call in calls)]
        return [*found, "reference"] if machine.vendor == "cpu" else found
    names = asked.split(",")
    if alone:
        for name in names:
            parse_overrides(f"{op}={name}", "--provider", registry)
        return names
    mine = registry.of(op)
    return [name for name in names if (word := name.partition(":")[0]) in RESERVED or Override("", word, "").pick(mine)]


def _checked(asked: str, operators: Sequence[Operator]) -> None:
    """Raises `UsageError` for a provider's name that none of the operators has."""
    from k3hal.dispatch.overrides import Override
    from k3hal.dispatch.provider import RESERVED
    from k3hal.dispatch.registry import default_registry
    from k3hal.dispatch.words import nearest

    theirs = [provider for operator in operators for provider in default_registry().of(operator.name)]
    known = {*RESERVED, *(word for p in theirs for word in (p.id, p.name, p.backend))}
    for name in filter(None, asked.split(",")):
        word = name.partition(":")[0]
        if word not in RESERVED and not Override("", word, "").pick(theirs):
            raise UsageError(f"--provider: none of these operators has a provider {name!r}", hint=nearest(word, known))


def _tuned(call: Call) -> list[str]:
    """The tactic that tuning found for what selection takes, where it is not the default."""
    from k3hal.dispatch.assemble import tactics_in_force
    from k3hal.dispatch.provider import DEFAULT
    from k3hal.dispatch.registry import default_registry
    from k3hal.dispatch.select import Selector

    decision = Selector(default_registry(), (), "warn", tactics_in_force()).decide(call)
    chosen = decision.chosen
    return [f"{chosen.id}:{decision.tactic}"] if chosen and decision.tactic != DEFAULT else []


def _bench_files(
    operators: Sequence[Operator], files: Sequence[Path], provider: str, how: _How, into: BenchResult
) -> None:
    from k3hal.cli.op_cases import cases_of
    from k3hal.debug.bench import bench_cases
    from k3hal.debug.ceilings import measure_ceilings

    if len(operators) > 1:
        raise UsageError("--case goes with one operator", hint="name it")
    op = operators[0].name
    cases = list(cases_of(op, names=None, tags=None, dtypes=None, files=files))
    names = _providers(op, provider, how.device, [case.call(how.device) for case in cases], alone=True)
    into.ceilings |= {kind: measure_ceilings(how.device, kind) for kind in dict.fromkeys(case.dtype for case in cases)}
    for limit in into.ceilings.values():
        how.note(limit)
    for timing in bench_cases(cases, names, how.device, into.ceilings, how.seconds, how.cache, failing=how.failing):
        into.timings.append(timing)
        how.note(timing)


def _ceilings_line(limit: Any, machine: DeviceDescription) -> str:
    return (
        f"{machine.id}: copy {limit.bytes_per_s / 1e9:.1f} GB/s, {limit.dtype} matmul "
        f"{limit.flops_per_s / 1e9:.1f} GFLOP/s, measured now, {limit.threads} threads"
    )


def _line(timing: Timing) -> str:
    verdict = timing.verdict
    head = f"{verdict.provider:<20} {verdict.case:<48}"
    if timing.seconds is None or timing.roofline is None or timing.spread is None:
        reasons = "; ".join(filter(None, (*verdict.reasons, timing.why)))
        return f"{head} {verdict.status}, not timed: {reasons}"
    floor = f"  {timing.seconds / timing.floor:.2f}x of the floor" if timing.floor else ""
    launched = ""
    if timing.in_a_row:
        copies = f", {timing.copies} copies" if timing.copies > 1 else ""
        why = f": {timing.why}" if timing.why else ""
        launched = f"  in a row {1e6 * timing.in_a_row:.1f} us ({timing.method}{copies}{why})"
    return (
        f"{head} {1e6 * timing.seconds:10.1f} us  {timing.flops / timing.seconds / 1e9:8.2f} GFLOP/s  "
        f"{timing.bytes / timing.seconds / 1e9:8.2f} GB/s  {100 * timing.roofline:5.1f} % of the roofline{floor}  "
        f"spread {timing.spread:.2f}{launched}" + ("" if verdict.ok else f"  {verdict.status}: {verdict.reasons[0]}")
    )
