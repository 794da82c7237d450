"""Which commit a report names where there is no git: what was noted in the checkout, and only of unchanged sources."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from k3hal.conform.source_state import STATE, digest, same_sources, source_state, write_state
from k3hal.errors import InputError

GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "dispatch").mkdir(parents=True)
    (root / "dispatch" / "a.py").write_text("A = 1\n", "utf-8")
    (root / "pyproject.toml").write_text("[project]\n", "utf-8")
    (root / ".gitignore").write_text(f"{STATE}\n__pycache__/\n", "utf-8")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "one")):
        subprocess.run([*GIT, *words], cwd=root, check=True, capture_output=True)
    return root


def _copy(root: Path, to: Path) -> Path:
    """The tree without git."""
    for path in root.rglob("*"):
        if path.is_file() and ".git" not in path.relative_to(root).parts:
            target = to / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


def test_a_copy_of_a_clean_checkout_names_its_commit(repository: Path, tmp_path: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    written = write_state(repository)
    state = source_state(_copy(repository, tmp_path / "copy"))
    assert (state.commit, state.dirty) == (head.stdout.strip(), False)
    assert written == state


def test_a_copy_of_a_changed_checkout_is_dirty(repository: Path, tmp_path: Path) -> None:
    (repository / "dispatch" / "b.py").write_text("B = 1\n", "utf-8")
    assert write_state(repository).dirty
    assert source_state(_copy(repository, tmp_path / "copy")).dirty


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_a_copy_that_was_changed_afterwards_is_dirty(repository: Path, tmp_path: Path, change: str) -> None:
    write_state(repository)
    copy = _copy(repository, tmp_path / "copy")
    path = copy / "dispatch" / ("a.py" if change != "added" else "b.py")
    if change == "removed":
        path.unlink()
    else:
        path.write_text("A = 2\n", "utf-8")
    assert source_state(copy).dirty


def test_a_file_in_a_checkout_never_outweighs_git(repository: Path) -> None:
    state = {"commit": "0" * 40, "dirty": False, "digest": digest(repository)}
    (repository / STATE).write_text(json.dumps(state), "utf-8")
    assert source_state(repository).commit != "0" * 40


def test_sources_are_compared_with_a_commit_and_not_with_what_is_none(repository: Path) -> None:
    commit = source_state(repository).commit
    assert same_sources(repository, commit)
    assert not same_sources(repository, "0" * 40)
    assert not same_sources(repository, "--output=x")
    (repository / "README.md").write_text("no source", "utf-8")
    for words in (("add", "-A"), ("commit", "-qm", "two")):
        subprocess.run([*GIT, *words], cwd=repository, check=True, capture_output=True)
    assert same_sources(repository, commit)
    (repository / "dispatch" / "a.py").write_text("A = 2\n", "utf-8")
    assert not same_sources(repository, commit)


def test_compiled_files_do_not_count(repository: Path) -> None:
    before = digest(repository)
    cache = repository / "dispatch" / "__pycache__"
    cache.mkdir()
    (cache / "a.pyc").write_bytes(b"x")
    assert digest(repository) == before


def test_a_state_without_a_commit_is_dirty(repository: Path, tmp_path: Path) -> None:
    write_state(repository)
    copy = _copy(repository, tmp_path / "copy")
    told = json.loads((copy / STATE).read_text("utf-8"))
    (copy / STATE).write_text(json.dumps(told | {"commit": ""}), "utf-8")
    assert source_state(copy).dirty


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"commit": "a"}', "\0"])
def test_a_malformed_state_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text, "utf-8")
    with pytest.raises(InputError, match="not a source state"):
        source_state(tmp_path)


def test_without_git_no_state_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="git does not say"):
        write_state(tmp_path)
