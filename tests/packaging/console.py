"""Console sessions in pages: reading a block's commands and the output they should have, and running them."""

from __future__ import annotations

import doctest
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_END_OF_OUTPUT = "--8<-- end of output"
Pair = tuple[str, str]
"""A command, as many lines as it has, and the output expected of it."""


def session(text: str) -> list[Pair]:
    """The pairs of a block: `$ ` begins a command, `> ` goes on with it, what follows is its output."""
    pairs: list[Pair] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            pairs.append((line[2:], ""))
            continue
        command, output = pairs[-1]
        pairs[-1] = (command + line[2:], "") if line.startswith("> ") and not output else (command, output + line)
    return pairs


def run_session(pairs: list[Pair], cwd: Path, environment: Mapping[str, str]) -> list[str]:
    """What each command prints, stderr included, in one shell. Fewer outputs than commands: the shell ended early."""
    # The marker keeps the status of the command before it, for an `echo $?` that follows.
    marker = f's=$?; echo "{_END_OF_OUTPUT}"; (exit $s)\n'
    script = "exec 2>&1\n" + "".join(command + marker for command, _ in pairs)
    command = ["bash", "--norc", "-c", script]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split(f"{_END_OF_OUTPUT}\n")[:-1]


def mismatch(pair: Pair, got: str) -> str:
    """What to say of an output that is not the one expected, in which `...` stands for anything; empty if it is."""
    command, want = pair
    if doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        return ""
    return f"$ {command}expected:\n{want}\ngot:\n{got}"
