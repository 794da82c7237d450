"""What git says of the sources, written to a file for a copy of them that travels without git.

`python -m k3hal.conform.source_state` writes it in a checkout. It holds a hash of the sources, so that a copy which was
changed afterwards is known to be dirty.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import k3hal
from k3hal.errors import InputError

STATE = ".source-state"
SOURCES = ("k3hal", "dispatch", "backends", "model", "pyproject.toml")
VALUES = ("dispatch/*.py", "k3hal/debug/*.py")
"""The sources, as git matches paths, that decide a sample's values and its golden's."""
_SKIPPED = ("__pycache__", ".ruff_cache")


@dataclass(frozen=True, slots=True)
class SourceState:
    """`commit` is empty where it is not known; `dirty` says that the sources are not that commit's. `digest` is of the
    sources themselves."""

    commit: str
    dirty: bool
    digest: str = ""


def source_root() -> Path | None:
    """The checkout this package is used from, or a copy of one that brought its state; None for an installed one."""
    for folder in Path(k3hal.__file__).resolve().parents:
        if (folder / "dispatch").is_dir() and ((folder / ".git").exists() or (folder / STATE).is_file()):
            return folder
    return None


def source_state(root: Path) -> SourceState:
    """Of a checkout as it is now, or of a copy by its file. What neither git nor an unchanged file says is dirty."""
    if (root / ".git").exists():
        commit = git_output(root, "rev-parse", "HEAD")
        changed = git_output(root, "status", "--porcelain", "--", *SOURCES)
        return SourceState(commit or "", changed != "")
    told = _read(root / STATE)
    return SourceState(told.commit, told.dirty or not told.commit or told.digest != digest(root), told.digest)


def same_sources(root: Path, commit: str, paths: Sequence[str] = SOURCES) -> bool:
    """Whether the sources, or those of them at `paths`, are now those of a commit; no for one that git does not know.

    A copy that travels without git knows only of all of them.
    """
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit):
        return False
    if (root / ".git").exists():
        return git_output(root, "diff", "--quiet", commit, "--", *paths) is not None
    state = source_state(root)
    return state.commit == commit and not state.dirty


def write_state(root: Path) -> SourceState:
    """Write what git says. Raises `InputError` where there is no git."""
    now = source_state(root) if (root / ".git").exists() else SourceState("", True)
    if not now.commit:
        raise InputError(f"{root}: git does not say which commit this is", hint="write the state in the checkout")
    state = SourceState(now.commit, now.dirty, digest(root))
    (root / STATE).write_text(json.dumps(asdict(state)) + "\n", "utf-8")
    return state


def digest(root: Path) -> str:
    """SHA-256 over the names and bytes of all source files."""
    out = hashlib.sha256()
    for top in SOURCES:
        for path in sorted((root / top).rglob("*")) if (root / top).is_dir() else [root / top]:
            if path.is_file() and not any(part in _SKIPPED for part in path.relative_to(root).parts):
                out.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
                out.update(path.read_bytes())
    return out.hexdigest()


def _read(path: Path) -> SourceState:
    try:
        told = json.loads(path.read_text("utf-8"))
        return SourceState(str(told["commit"]), bool(told["dirty"]), str(told["digest"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a source state: {error}", hint="write it again: ci/device state") from error


def git_output(root: Path, *words: str) -> str | None:
    """What git prints; None where it is not installed or fails, and so what it would say is not known."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    root = source_root()
    if root is None:
        raise InputError("this k3hal is installed: it has no checkout", hint="run it from one")
    state = write_state(root)
    sys.stdout.write(f"{state.commit}{' dirty' if state.dirty else ''}\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"k3hal: error: {error}")
