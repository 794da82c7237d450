"""The documentation is true: marked examples run and print what the page says, and its tables are complete.

A fenced block is run when its info string ends in `test`:

- `python test`: the block runs in a fresh interpreter and must succeed;
- `console test`: a line that starts with `$ ` is a command, what follows is its output, stderr included, where `...`
  stands for anything. All commands of a block share a shell, and so `$ echo $?` shows an exit code.

Blocks `console guide` belong to a page that is followed as a whole: test_vendor_guide.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from k3hal.cli import common
from k3hal.cli.app import VERBS
from k3hal.env import VARIABLES

from .console import FENCE, mismatch, run_session, session
from .shared_cache import with_what_this_machine_has

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLI_PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block: `where` is page:line for messages, `info` the words after the fence."""

    where: str
    info: str
    text: str


def _blocks() -> list[Block]:
    blocks = []
    for page in PAGES:
        source = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(source):
            line = source.count("\n", 0, match.start()) + 1
            blocks.append(Block(f"{page.relative_to(ROOT)}:{line}", match["info"].strip(), match["text"]))
    return blocks


def _parameters(*kinds: str) -> list[object]:
    return [pytest.param(block, id=block.where) for block in _blocks() if block.info in kinds]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of an example: `k3hal` and `python` are this interpreter's, home is an empty folder."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in {"k3hal": "-m k3hal", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -P {command} "$@"\n', encoding="utf-8")
        (tools / name).chmod(0o755)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("K3HAL_")}
    paths = [str(ROOT / path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return plain | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(with_what_this_machine_has(tmp_path / "cache")),
    }


@pytest.mark.parametrize("block", _parameters("console test"))
def test_console_example(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    pairs = session(block.text)
    outputs = run_session(pairs, tmp_path, environment)
    assert len(outputs) == len(pairs), outputs
    for pair, got in zip(pairs, outputs, strict=True):
        assert not (problem := mismatch(pair, got)), problem


@pytest.mark.parametrize("block", _parameters("python test"))
def test_python_example(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", block.text]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", _parameters("python", "python test"))
def test_python_blocks_compile(block: Block) -> None:
    assert compile(block.text, block.where, "exec")


def test_every_block_says_what_it_is() -> None:
    guide = {"console guide", "console guide nightly"}
    known = guide | {"bash", "console", "console test", "json", "python", "python test", "text", "toml", "yaml"}
    assert [block.where for block in _blocks() if block.info not in known] == []


def test_the_console_runner_notices_a_wrong_page(environment: dict[str, str], tmp_path: Path) -> None:
    block = Block("here", "console test", "$ echo one\ntwo\n")
    with pytest.raises(AssertionError, match=r"expected:\n *two"):
        test_console_example(block, environment, tmp_path)


def test_cli_page_lists_every_verb_variable_and_common_flag() -> None:
    for name in (*VERBS, *VARIABLES):
        assert f"\n| `{name}` |" in CLI_PAGE, name
    annotated = [value for value in vars(common).values() if hasattr(value, "__metadata__")]
    # In an annotation, typer's Option takes its first name where a default would stand otherwise.
    flags = [value.__metadata__[0].default for value in annotated]
    assert "--json" in flags
    for flag in flags:
        assert f"\n| `{flag}` |" in CLI_PAGE, flag


def test_the_map_names_every_package_of_the_front() -> None:
    listed = set(re.findall(r"^\| \[[^|]*\| `k3hal\.(\w+)`", (ROOT / "README.md").read_text(), re.MULTILINE))
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert {name.removeprefix("k3hal.") for name in packages if name.count(".") == 1} == listed
