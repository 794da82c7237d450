"""The logs of long tests, which are committed, say truly what they ran on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _tool(file: Path, text: str = "exit 0") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(("script", "log"), [("test-vllm", "vllm.log"), ("nightly", "nightly.log")])
def test_a_log_that_is_written_over_makes_no_commit_dirty(tmp_path: Path, script: str, log: str) -> None:
    """`python` stands for the tests, and takes its time so that the log has been opened when git looks."""
    repository, bin_ = tmp_path / "repository", tmp_path / "venv" / "bin"
    _tool(bin_ / "python", "echo ran")
    _tool(tmp_path / "tools" / "npm", "exit 1")
    _tool(tmp_path / "tools" / "git", f'sleep 0.3; exec "{shutil.which("git")}" "$@"')
    _tool(repository / "ci" / "setup-vllm")
    shutil.copy(ROOT / "ci" / script, repository / "ci" / script)
    (repository / "ci" / log).write_text("of another commit\n")
    identity = ["-c", "user.name=k3hal", "-c", "user.email=k3hal@localhost"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    environment = {**os.environ, "PATH": f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"}
    where = str(bin_ if script == "nightly" else bin_.parent)
    subprocess.run([f"ci/{script}", where], cwd=repository, env=environment, check=True, capture_output=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    written = (repository / "ci" / log).read_text()
    assert written.splitlines()[0] == f"commit   {head.stdout.strip()}" and "ran" in written
