"""`k3hal doctor`: this machine, its devices and versions, and what would run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json


def doctor(as_json: Json = False) -> int:
    """Show this machine, its devices and versions, and what would run.

    Exits with 1 when something that K3HAL needs is missing or broken.
    """
    from k3hal.doctor import SCHEMA, examine

    report = examine()
    if as_json:
        print_json(SCHEMA, report)
    else:
        typer.echo("\n".join(f"{label:<9} {value}" for label, value in _rows(report)))
    return 1 if report["problems"] else 0


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
