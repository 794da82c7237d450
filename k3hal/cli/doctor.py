"""`k3hal doctor`: this machine, its devices and versions, what would run, and whether a model fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from k3hal.cli.common import (
    Device,
    DType,
    ExpertActivations,
    Json,
    KvCacheDType,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MemoryBudget,
    settings_from,
)
from k3hal.cli.output import print_json
from k3hal.errors import UsageError


def doctor(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint directory whose memory to plan; nothing is loaded."),
    ] = None,
    device: Device = None,
    dtype: DType = None,
    kv_cache_dtype: KvCacheDType = None,
    expert_activations: ExpertActivations = None,
    memory_budget: MemoryBudget = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    as_json: Json = False,
) -> int:
    """Show this machine, its devices and versions, and what would run; of MODEL also how memory would be divided.

    Exits with 1 when something that K3HAL needs is missing or broken, or MODEL does not fit.
    """
    from k3hal.doctor import SCHEMA, examine
    from k3hal.settings import Settings

    options = settings_from(ctx, Settings).engine_options()
    given = [f"--{name.replace('_', '-')}" for name in _OF_A_MODEL if ctx.params[name] is not None]
    if model is None and given:
        raise UsageError(f"{given[0]} is given without a MODEL", hint="name the model whose memory is to be planned")
    report = examine(model, options)
    if as_json:
        print_json(SCHEMA, report)
    else:
        _print(report)
    return 1 if report["problems"] else 0


_OF_A_MODEL = (
    "device", "dtype", "kv_cache_dtype", "expert_activations", "memory_budget", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens",
)  # fmt: skip


def _print(report: dict[str, Any]) -> None:
    typer.echo("\n".join(f"{label:<9} {value}" for label, value in _rows(report)))
    memory = report["memory"]
    if memory is None:
        return
    from k3hal.cli.memory_table import print_memory

    typer.echo()
    print_memory(f"memory of {memory['model']} on {memory['device']}", memory)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    machine, torch, cache = report["machine"], report["torch"], report["cache"]
    yield "k3hal", report["k3hal"]
    yield "system", f"{machine['system']} {machine['architecture']}"
    yield "cpu", f"{machine['cpu']}, {machine['threads']} threads"
    yield "isa", " ".join(machine["isa"]) or "nothing beyond the baseline"
    yield "memory", f"{_gb(machine['memory_available'])} free of {_gb(machine['memory_total'])}"
    yield "python", report["python"]["version"]
    if torch:
        yield "torch", f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability']}"
    for device in report["devices"]:
        yield "device", f"{device['device']} ({device['name']}, {device['arch']}, {_gb(device['memory_total'])})"
    yield "cache", f"{cache['path']}, {_gb(cache['disk_free'])} free on disk"
    yield "packages", ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version)
    yield from _plan_rows(report["would_run"])
    for problem in report["problems"]:
        yield "problem", problem


def _plan_rows(plan: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """The operators by provider."""
    if plan is None:
        return
    by_provider: dict[str, list[str]] = {}
    for operator, provider in plan["operators"].items():
        by_provider.setdefault(provider, []).append(operator)
    for provider, operators in sorted(by_provider.items()):
        yield "runs", f"on {plan['device']} by {provider}: {', '.join(operators)}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
