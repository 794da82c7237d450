"""Launches as a shell script: variables such as `$HEAD_IP` are the reader's to set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from k3hal.plan.deployment import Deployment

_BARE = re.compile(r"([A-Za-z0-9_./=:@,+%-]|\$[A-Za-z_][A-Za-z0-9_]*)+")
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def quoted(token: str) -> str:
    """A token as a POSIX shell reads it back, its `$VARIABLES` expanded where nothing else needs quotes."""
    if _BARE.fullmatch(token):
        return token
    return "'" + token.replace("'", "'\\''") + "'"


def launch_line(env: Iterable[tuple[str, str]], argv: Sequence[str]) -> str:
    """One launch on one line."""
    return " ".join([*(f"{name}={quoted(value)}" for name, value in env), *map(quoted, argv)])


def comment(text: str) -> str:
    """A text as one comment line: a newline in it would begin a command."""
    return f"# {' '.join(text.split())}"


def substituted(token: str, reference: str, escape: tuple[str, str]) -> str:
    """A token for a format with variables of its own: the shell's `$NAME` as `reference` (a template with `\\1`)
    where a shell would expand it, everything else literal, by `escape` (what to replace, and with what)."""
    if _BARE.fullmatch(token):
        return _VARIABLE.sub(reference, token)
    return token.replace(*escape)


def script(plan: Deployment) -> str:
    """A script with one function for each launch; `script.sh ROLE NODE` runs one."""
    lines = [
        "#!/usr/bin/env bash",
        comment(f"{plan.recipe}, variant {plan.variant}: {plan.strategy} on {plan.nodes} x {plan.hardware.id}."),
        *(comment(f"Warning: {warning}") for warning in plan.warnings),
        "set -euo pipefail",
        'case "${1:-server} ${2:-0}" in',
    ]
    for group in plan.groups:
        for launch in group.launches:
            names = variables_of([*launch.argv, *launch.env.values()])
            lines += _case(f"{launch.role} {launch.node}", names, launch_line(launch.env.items(), launch.argv))
    if plan.router:
        lines += _case("router 0", variables_of(plan.router), launch_line((), plan.router))
    lines += ['*) echo "usage: $0 ROLE NODE" >&2; exit 4 ;;', "esac"]
    return "\n".join(lines)


def variables_of(texts: Iterable[str]) -> list[str]:
    """Names of the variables that texts leave open."""
    bare = (text for text in texts if _BARE.fullmatch(text))
    return list(dict.fromkeys(name for text in bare for name in _VARIABLE.findall(text)))


def _case(label: str, names: list[str], line: str) -> list[str]:
    needed = [f'    : "${{{name}:?set {name}}}"' for name in names]
    return [f'"{label}")', *needed, f"    exec env {line}", "    ;;"]
