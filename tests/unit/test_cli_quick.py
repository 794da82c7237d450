"""Values read plainly are what typer's own conversion makes of them, errors included."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main

from k3hal.cli.quick import read_plainly

LINES = [
    [],
    ["--text", "a", "--number", "3"],
    ["--text", "", "--number", "007"],
    ["--text", "-1", "--number=-1"],
    ["--number", "1.5"],
    ["--number", "many"],
    ["--number", "٣"],
    ["--number", "9" * 30],
    ["--least", "0"],
    ["--least", "1"],
    ["--least", "9"],
    ["--least", "10"],
    ["--many", "a", "--many", "b"],
    ["--share", "0.5"],
    ["--share", "half"],
    ["--file", "x/y"],
    ["--switch"],
    ["word"],
    ["word", "more"],
    ["--unknown"],
    ["--number"],
]


def _command(*, plain: bool) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    def run(
        word: Annotated[str | None, typer.Argument()] = None,
        text: Annotated[str | None, typer.Option()] = None,
        number: Annotated[int | None, typer.Option()] = None,
        least: Annotated[int | None, typer.Option(min=1, max=9)] = None,
        many: Annotated[list[str] | None, typer.Option()] = None,
        share: Annotated[float | None, typer.Option()] = None,
        file: Annotated[Path | None, typer.Option()] = None,
        switch: Annotated[bool, typer.Option("--switch")] = False,
    ) -> None:
        raise AssertionError("only parsed")

    command = typer.main.get_command(app)
    if plain:
        read_plainly(command)
    return command


def _parsed(command: Any, line: list[str]) -> tuple[str, Any]:
    try:
        with command.make_context("run", list(line)) as context:
            return "parsed", {name: (type(value), value) for name, value in context.params.items()}
    except typer.TyperException as error:
        return "refused", error.format_message()


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_command_line_means_the_same(line: list[str]) -> None:
    assert _parsed(_command(plain=True), line) == _parsed(_command(plain=False), line)
