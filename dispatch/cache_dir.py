"""Where regenerable files of this user live."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3hal.dispatch.errors import InputError

HINT = "set XDG_CACHE_HOME to a writable folder"


def cache_dir() -> Path:
    """Built checkpoints, compiled kernels and the like: `$XDG_CACHE_HOME/k3hal`, else `~/.cache/k3hal`.

    Raises `InputError` where neither is known.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path counts as unset: so the variable's specification demands.
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError as error:
            raise InputError("the cache has no place: this user has no home folder", hint=HINT) from error
    return root / "k3hal"


@contextmanager
def using_cache(path: Path) -> Iterator[None]:
    """Around reading or writing `path` within the cache folder: an `OSError` becomes an `InputError` that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"the cache folder {path} cannot be used: {error.strerror or error}", hint=HINT) from error
