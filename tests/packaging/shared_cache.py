"""What a new user's cache may hold from the start."""

from __future__ import annotations

from pathlib import Path

from k3hal.dispatch.cache_dir import cache_dir


def with_what_this_machine_has(cache: Path) -> Path:
    """`cache`, for `XDG_CACHE_HOME`, with this user's compiled code and built models: they are named by their sources,
    so making them again would give the same and take most of a test's time."""
    (cache / "k3hal").mkdir(parents=True)
    for name in ("native", "checkpoints"):
        there = cache_dir() / name
        there.mkdir(parents=True, exist_ok=True)
        (cache / "k3hal" / name).symlink_to(there)
    return cache
