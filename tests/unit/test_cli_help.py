"""What `--help` shows of every verb: each argument and flag is explained, under a name a reader can use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from k3hal.cli.app import VERBS, load_verb


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The command, or for a group each of its own."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, inner in command.commands.items():
        yield from _commands(f"{name} {part}", inner)


COMMANDS = dict(pair for verb in VERBS for pair in _commands(verb, load_verb(verb)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_explained(name: str) -> None:
    command = COMMANDS[name]
    with command.make_context(name, [], resilient_parsing=True) as ctx:
        usage, text = ctx.get_usage(), ctx.get_help()
        unexplained = [p.name for p in command.get_params(ctx) if not getattr(p, "help", None)]
    assert unexplained == []
    assert "[[" not in usage and "......" not in usage.replace("]...", "...").replace("}...", "..."), usage
    # A type's name says nothing about what a value means: each flag has a metavar.
    assert re.findall(r"--[a-z-]+ <.*", text) == []


@pytest.mark.parametrize("name", [name for name in VERBS if hasattr(load_verb(name), "commands")])
def test_the_list_of_a_group_shows_whole_sentences(name: str) -> None:
    group = load_verb(name)
    with group.make_context(name, [], resilient_parsing=True) as ctx:
        text = ctx.get_help()
    _, _, listed = text.partition("Commands:")
    assert (listed + "\n").count(".\n") == len(group.commands) and "..." not in listed, listed
