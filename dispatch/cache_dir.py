"""Where regenerable files of this user live."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Built checkpoints, compiled kernels and the like: `$XDG_CACHE_HOME/k3hal`, else `~/.cache/k3hal`."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path counts as unset: so the variable's specification demands.
    return (root if root.is_absolute() else Path.home() / ".cache") / "k3hal"
