"""Where regenerable files of this user live."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Built checkpoints, compiled kernels and the like: `$XDG_CACHE_HOME/k3hal`, else `~/.cache/k3hal`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "k3hal"
