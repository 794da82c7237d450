"""The vendor guide, followed to the letter: its files are written, its commands typed, and what they print compared.

A block after `<!-- file: PATH -->` is written to PATH; blocks `console guide` are typed in order, in one folder; those
of `console guide nightly` only by `make nightly`. What is there in the end is docs/vendor_example.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import k3hal
from k3hal.conform.environment import statement

from .console import mismatch, run_session, session
from .shared_cache import with_what_this_machine_has

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "vendor.md"
EXAMPLE = ROOT / "docs" / "vendor_example"
_STEP = re.compile(
    r"^(?:<!-- file: (?P<path>\S+) -->\n)?```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
# Notes may come before it: sources with changes are not those of the report's commit.
_OF_A_DIRTY_TREE = "...rejected: the tree was dirty: sources had changes that no commit holds\n"


class Reader:
    """Someone with a new environment, who does what the page says."""

    def __init__(self, home: Path) -> None:
        self.home, self.cwd = home, home
        self._socket = home / "k3hal.sock"
        self._server: subprocess.Popen[bytes] | None = None
        python = _environment_with_k3hal(home / "env")
        command = python.with_name("k3hal")
        client = f'exec "{sys.executable}" -S "{Path(__file__).with_name("warm_k3hal.py")}" "{self._socket}" run "$@"\n'
        command.write_text(f"#!/bin/sh\n{client}", encoding="utf-8")
        command.chmod(0o755)
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("K3HAL_", "PIP_", "GIT_"))}
        self.environ = plain | {
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(k3hal.__file__).absolute().parents[1]),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(with_what_this_machine_has(home / "cache")),
            # What pip would fetch is in this interpreter's environment, and there may be no network.
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            **{f"GIT_{who}_{what}": "reader" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }

    def write(self, path: str, text: str) -> None:
        file = self.cwd / path
        file.write_text(text, encoding="utf-8")
        # Within a second a file of the same size would be taken for the one that was compiled before.
        os.utime(file, ns=(time.time_ns(), time.time_ns() - 10_000_000_000 * (1 + len(text) % 7)))

    def type(self, text: str) -> list[str]:
        """What differs from the page."""
        pairs = session(text)
        if self._server is None and any(command.startswith("k3hal ") for command, _ in pairs[1:]):
            outputs = run_session([*pairs[:1], ("pwd\n", "")], self.cwd, self.environ)
            self._start()
            return [mismatch(pairs[0], outputs[0]), *self._type(pairs[1:])]
        return self._type(pairs)

    def _type(self, pairs: list[tuple[str, str]]) -> list[str]:
        *outputs, folder = run_session([*pairs, ("pwd\n", "")], self.cwd, self.environ)
        self.cwd = Path(folder.strip())
        return [mismatch(pair, got) for pair, got in zip(pairs, outputs, strict=True)]

    def _start(self) -> None:
        """Load what `k3hal` loads, now that the package is installed."""
        server = [str(self.home / "env" / "bin" / "python"), "-P", str(Path(__file__).with_name("warm_k3hal.py"))]
        self._server = subprocess.Popen([*server, str(self._socket)], env=self.environ)
        while not self._socket.exists():
            assert self._server.poll() is None, "k3hal cannot be loaded"
            time.sleep(0.05)

    def close(self) -> None:
        if self._server is not None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self._socket))
            assert self._server.wait(10) == 0


def _environment_with_k3hal(folder: Path) -> Path:
    """A virtual environment that sees what is installed for this interpreter; its python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3*/site-packages")
    # Unlike a mere path, this reads the .pth files there, by which editable installations are found.
    ours = sysconfig.get_path("purelib")
    (site / "this_interpreter.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    return python


@contextmanager
def _reader(home: Path) -> Iterator[Reader]:
    reader = Reader(home)
    try:
        yield reader
    finally:
        reader.close()


def _follow(reader: Reader, *, nightly: bool) -> None:
    """Do every step; fails at the first block that prints something else, with its line of the page."""
    source = GUIDE.read_text(encoding="utf-8")
    if statement().dirty:
        source = re.sub(r"^verified: \w+\n", _OF_A_DIRTY_TREE, source, flags=re.MULTILINE)
    for step in _STEP.finditer(source):
        if step["path"]:
            reader.write(step["path"], step["text"])
        elif step["info"] == "console guide" or (nightly and step["info"] == "console guide nightly"):
            line = source.count("\n", 0, step.start()) + 1
            problems = [problem for problem in reader.type(step["text"]) if problem]
            assert not problems, f"vendor.md:{line}:\n" + "\n".join(problems)


def test_the_page_shows_the_files_of_the_example() -> None:
    # Of a file that is shown twice, a wrong one and then a right one, the last is the example's.
    shown = {step["path"]: step["text"] for step in _STEP.finditer(GUIDE.read_text("utf-8")) if step["path"]}
    assert shown == {str(path.relative_to(EXAMPLE)): path.read_text("utf-8") for path in _files(EXAMPLE)}


def test_the_guide_works_as_written_and_ends_at_the_example(tmp_path: Path) -> None:
    with _reader(tmp_path) as reader:
        _follow(reader, nightly=False)
        assert _modes(reader.cwd) == _modes(EXAMPLE)
        made = list(_modes(reader.cwd))
        there = {str(path.relative_to(EXAMPLE)): path.read_text("utf-8") for path in _files(EXAMPLE)}
        assert {name: (reader.cwd / name).read_text("utf-8") for name in made} == there
        report = json.loads((reader.cwd / "quick" / "report.json").read_text("utf-8"))
        (package,) = report["packages"]
        assert (package["name"], package["version"], package["dirty"]) == ("k3hal-acme", "0.1.0", False)
        assert re.fullmatch("[0-9a-f]{40}", package["commit"])


def _modes(folder: Path) -> dict[str, str]:
    """Git's mode of each tracked file below a folder: what is a script can be called as one."""
    command = ["git", "ls-files", "--stage"]
    lines = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path: facts.split()[0] for facts, path in (line.split("\t") for line in lines)}


def _files(folder: Path) -> list[Path]:
    mine = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "."], cwd=folder, capture_output=True, text=True
    )
    return [folder / name for name in mine.stdout.split()]


@pytest.mark.nightly
def test_the_whole_run_of_the_guide(tmp_path: Path) -> None:
    with _reader(tmp_path) as reader:
        _follow(reader, nightly=True)
