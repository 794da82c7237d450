"""`k3hal doctor`: this machine, its devices and versions."""

from __future__ import annotations

from typing import Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json


def doctor(as_json: Json = False) -> int:
    """Show this machine, its devices and versions.

    Exits with 1 when a required package is missing or torch does not import.
    """
    from k3hal.doctor import SCHEMA, examine

    report = examine()
    if as_json:
        print_json(SCHEMA, report)
    else:
        typer.echo(_as_text(report))
    return 1 if report["missing"] or "error" in report["torch"] else 0


def _as_text(report: dict[str, Any]) -> str:
    machine, torch, cache = report["machine"], report["torch"], report["cache"]
    rows = [
        ("k3hal", report["k3hal"]),
        ("system", f"{machine['system']} {machine['architecture']}"),
        ("cpu", f"{machine['cpu'] or 'unknown'}, {machine['threads']} threads on {machine['cores'] or '?'} cores"),
        ("isa", " ".join(machine["isa"]) or "nothing beyond the baseline"),
        ("memory", f"{_gb(machine['memory_available'])} free of {_gb(machine['memory_total'])}"),
        ("python", report["python"]["version"]),
        ("torch", torch.get("error") or f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability']}"),
    ]
    rows += [("device", _device_line(device)) for device in report["devices"]]
    rows.append(("cache", f"{cache['path']}, {_gb(cache['disk_free'])} free on disk"))
    versions = [f"{name} {version}" for name, version in report["packages"].items() if version]
    rows.append(("packages", ", ".join(versions)))
    if report["missing"]:
        rows.append(("missing", ", ".join(report["missing"])))
    return "\n".join(f"{label:<9} {value}" for label, value in rows)


def _device_line(device: dict[str, Any]) -> str:
    memory = device["memory_total"]
    return f"{device['device']} ({device['name']}" + (f", {_gb(memory)})" if memory else ")")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
