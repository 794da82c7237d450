"""`k3hal op`: which provider runs each operator, on this machine or a described one, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import DType, ExpertActivations, Json, KvCacheDType, Ops, Plan
from k3hal.cli.op_bench import bench
from k3hal.cli.op_bisect import bisect
from k3hal.cli.op_compare import compare
from k3hal.cli.op_dump import dump
from k3hal.cli.op_explain import explain
from k3hal.cli.op_replay import replay
from k3hal.cli.op_run import run_operator
from k3hal.cli.op_tune import tune
from k3hal.cli.output import print_json
from k3hal.errors import BackendError, UsageError

if TYPE_CHECKING:
    from k3hal.dispatch.call import Call
    from k3hal.dispatch.device import DeviceDescription
    from k3hal.dispatch.operator import Operator
    from k3hal.dispatch.plan import DispatchPlan
    from k3hal.dispatch.provider import Provider
    from k3hal.dispatch.registry import Registry
    from k3hal.dispatch.select import Selector

app = typer.Typer(no_args_is_help=True, help="Operators: what runs them, and whether it is right.")
app.command("run")(run_operator)
app.command("compare")(compare)
app.command("explain")(explain)
app.command("dump")(dump)
app.command("replay")(replay)
app.command("bisect")(bisect)
app.command("bench")(bench)
app.command("tune")(tune)

AnyDevice = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda:1, rocm, npu, or a described one (mi355x).")
]
OpGlob = Annotated[str, typer.Option("--op", metavar="GLOB", help='Only these operators: "kda_*".')]
# Toolkits and libraries worth showing whether or not a provider asks for them.
_PACKAGES = ("torch", "triton", "cuda", "rocm", "cann")


@app.command("list")
def list_operators(
    glob: Annotated[str | None, typer.Argument(metavar="GLOB", help="The same as --op.")] = None,
    device: AnyDevice = "auto",
    op: OpGlob = "*",
    as_json: Json = False,
) -> None:
    """List operators, their providers, and whether each runs here what the full-size model asks of it."""
    from k3hal.dispatch.probe import resolve_device
    from k3hal.dispatch.registry import default_registry, get_operator, operator_names
    from k3hal.dispatch.words import nearest

    if glob is not None:
        if op != "*":
            raise UsageError(f"both {glob!r} and --op {op!r}", hint="give one of them")
        op = glob
    machine, registry = resolve_device(device), default_registry()
    names = [name for name in operator_names() if fnmatchcase(name, op)]
    if not names:
        raise UsageError(f"no operator matches {op!r}", hint=nearest(op, operator_names()))
    rows = []
    for name in names:
        operator = get_operator(name)
        rows.append(
            {
                "op": name,
                "family": operator.family,
                "summary": operator.summary,
                "lowers_to": list(operator.lowers_to),
                "providers": _availability(operator, machine, registry),
            }
        )
    if as_json:
        print_json("k3hal.op_list/1", {"device": machine.id, "operators": rows})
        return
    for row in rows:
        typer.echo(f"{row['op']}  {row['summary']}")
        for provider in row["providers"]:
            verdict = "available" if provider["available"] else "; ".join(provider["reasons"])
            typer.echo(f"    {provider['provider']:<24} {verdict}")
        if not row["providers"]:
            typer.echo("    no provider" + (f"; composed of {', '.join(row['lowers_to'])}" if row["lowers_to"] else ""))


def _availability(operator: Operator, machine: DeviceDescription, registry: Registry) -> list[dict[str, Any]]:
    """What each provider answers for the calls that the full-size model makes of an operator, as `op explain` says."""
    from k3hal.cli.op_calls import activation_dtype, call_of
    from k3hal.dispatch.select import Selector

    call = call_of(operator, machine, activation_dtype(None), None, ())
    said = dict(_answers(Selector(registry), registry.of(operator.name), call))
    return [
        {
            "provider": provider.id,
            "backend": provider.backend,
            "available": said[provider.id][0],
            "reasons": [] if said[provider.id][0] else list(said[provider.id][1]),
            "auto": registry.backends[provider.backend].auto,
            "priority": registry.priority(provider),
            "graph_safe": provider.graph_safe,
            "deterministic": provider.deterministic,
        }
        for provider in registry.of(operator.name)
    ]


def _answers(
    selector: Selector, providers: Sequence[Provider], call: Call
) -> Iterator[tuple[str, tuple[bool, tuple[str, ...]]]]:
    """Each provider's answer; one that crashes when it is asked hides nobody else's."""
    from k3hal.dispatch.select import answer

    try:
        yield from ((line.provider, (line.accepted, line.reasons)) for line in selector.consider(call))
    except BackendError:
        for provider in providers:
            try:
                line = answer(provider, call, None)
                yield provider.id, (line.accepted, line.reasons)
            except BackendError as error:
                yield provider.id, (False, (str(error),))


@app.command("probe")
def probe_devices(
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="One device, also a described one; default: all here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the devices of this machine are, as providers see them."""
    from k3hal.cli.op_calls import device_json
    from k3hal.dispatch.probe import present_devices, resolve_device
    from k3hal.dispatch.registry import default_registry

    devices = present_devices() if device is None else (resolve_device(device),)
    packages = {*_PACKAGES, *(name for p in default_registry().providers for name in p.needs.packages)}
    facts = [device_json(d, packages) for d in devices]
    if as_json:
        print_json("k3hal.op_probe/1", {"devices": facts})
        return
    for fact in facts:
        typer.echo(f"{fact['device']}  {fact['title']}")
        rates = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in fact["flops"].items())
        lines = {
            "arch": f"{fact['vendor']} {fact['arch']}",
            "memory": f"{fact['memory_bytes'] / 1e9:.1f} GB" if fact["memory_bytes"] else "unknown",
            "bandwidth": f"{fact['bandwidth'] / 1e12:g} TB/s" if fact["bandwidth"] else "unknown",
            "TFLOP/s": rates or "unknown",
            "features": " ".join(fact["features"]) or "none known",
            "packages": ", ".join(f"{name} {version}" for name, version in fact["packages"].items()) or "none",
            "source": fact["source"],
        }
        for label, value in lines.items():
            typer.echo(f"    {label:<10} {value}")
        for note in fact["notes"]:
            typer.echo(f"    note       {note}")


@app.command("plan")
def plan_model(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Directory or config.json.")] = None,
    device: AnyDevice = "auto",
    dtype: DType = None,
    kv_cache_dtype: KvCacheDType = None,
    expert_activations: ExpertActivations = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Ranks the model is split over.")] = 1,
    ops: Ops = None,
    fallback: Annotated[
        str, typer.Option("--fallback", metavar="strict|warn", help="strict refuses where only a reference is left.")
    ] = "warn",
    plan: Plan = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the plan for --plan.")] = None,
    diff: Annotated[Path | None, typer.Option("--diff", metavar="FILE", help="Compare with a saved plan.")] = None,
    as_json: Json = False,
) -> int:
    """Decide which provider runs each operator of a model (default: the full-size Kimi K3).

    With --diff, prints where the saved plan differs and exits with 1 if it does.
    """
    from k3hal.dispatch.plan_file import SCHEMA, load_plan, plan_json, save_plan, saved
    from k3hal.dispatch.plan_pin import compare_plans

    made = _make_plan(model, device, (dtype, kv_cache_dtype, tp, expert_activations), ops, fallback, plan)
    if save:
        save_plan(made, save)
    differences = compare_plans(load_plan(diff), saved(made)) if diff else ()
    if as_json:
        payload = {key: value for key, value in plan_json(made).items() if key != "schema"}
        print_json(SCHEMA, payload | ({"differences": [str(d) for d in differences]} if diff else {}))
    elif diff:
        typer.echo("\n".join(map(str, differences)) or "no difference")
    else:
        _print_plan(made)
    return 1 if differences else 0


def _make_plan(
    model: str | None,
    device: str,
    shape: tuple[str | None, str | None, int, str | None],
    ops: str | None,
    fallback: str,
    pinned: Path | None,
) -> DispatchPlan:
    from k3hal.cli.op_calls import FULL_SIZE, activation_dtype, cache_dtype, requests_of, rounding
    from k3hal.dispatch.assemble import build_selector
    from k3hal.dispatch.plan import make_plan
    from k3hal.dispatch.plan_file import load_plan
    from k3hal.dispatch.plan_pin import pin_plan
    from k3hal.dispatch.probe import resolve_device

    dtype = activation_dtype(shape[0])
    machine = resolve_device(device)
    selector = build_selector(ops, fallback)
    requests = requests_of(model, dtype, cache_dtype(shape[1], dtype), shape[2], rounding(shape[3]))
    name = model or FULL_SIZE
    if pinned is None:
        return make_plan(requests, selector, model=name, device=machine, dtype=dtype)
    if selector.overrides:
        raise UsageError("--plan pins every provider; it cannot be combined with --ops or K3HAL_OPS")
    return pin_plan(load_plan(pinned), requests, selector.registry, model=name, device=machine, dtype=dtype)


def _print_plan(plan: DispatchPlan) -> None:
    from rich.console import Console

    from k3hal.dispatch.plan_text import plan_summary, plan_table

    console = Console()
    # Into a file or a pipe: wide enough for a row to be a line.
    if not console.is_terminal:
        console.width = 120
    console.print(plan_table(plan))
    typer.echo(plan_summary(plan))
