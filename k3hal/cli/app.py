"""The table of verbs and the root command. Adding a verb: one file in this folder and one row here.

A row names a verb module's function, or a `typer.Typer` for a group of verbs. The module is imported when its verb is
used, never for `k3hal --help`; heavy imports (torch) stand inside its functions all the same, so that `k3hal VERB
--help` is quick too. A verb returns None, or its exit code.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from k3hal import __version__
from k3hal.cli.quick import read_plainly


class Verb(NamedTuple):
    """Where a verb lives (`module:attribute`) and its line in `k3hal --help`."""

    target: str
    help: str


VERBS: dict[str, Verb] = {
    "serve": Verb("k3hal.cli.serve:serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "generate": Verb("k3hal.cli.generate:generate", "Continue a prompt, answer a chat, or answer a file of requests."),
    "render": Verb("k3hal.cli.render:render", "Show the exact prompt a chat request becomes."),
    "model": Verb("k3hal.cli.model:app", "Make, show, list and check checkpoints."),
    "plan": Verb("k3hal.cli.plan:plan", "Plan a deployment: launches, memory, and the origin of every flag."),
    "doctor": Verb("k3hal.cli.doctor:doctor", "Show this machine, its devices and versions, and what would run."),
    "op": Verb("k3hal.cli.op:app", "Operators: what runs them and why; compare, record, replay and bisect."),
    "conform": Verb("k3hal.cli.conform:app", "Prove the operators of this machine; check and compare such proofs."),
    "bench": Verb("k3hal.cli.bench:app", "Measure the engine, its cache and dispatch, and servers under load."),
}


class LazyGroup(TyperGroup):
    """A group that lists the table's verbs and imports the module of the one that runs."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.help, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name in VERBS else command, rest


def load_verb(name: str) -> Any:
    """Import the verb's module and return its click command (a group for a `typer.Typer`)."""
    module, _, attribute = VERBS[name].target.partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        target.rich_markup_mode = None
        group = typer.main.get_group(target)
        group.no_args_is_help = True
        group.name = name
        for command in group.commands.values():
            command.short_help = _first_sentence(command.help or "")
        read_plainly(group)
        return group
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(target)
    command = typer.main.get_command(single)
    read_plainly(command)
    return command


def _first_sentence(text: str) -> str:
    """What a list of commands shows of one, never cut off in the middle."""
    first = " ".join(text.split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") + "."


app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"k3hal {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Kimi K3 from one hardware-agnostic model text."""
