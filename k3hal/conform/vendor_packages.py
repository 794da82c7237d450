"""The packages that backends outside this tree come from: which version, and which commit of whose sources."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from k3hal.conform.source_state import git_output
from k3hal.dispatch.provider import ENTRY_POINT_GROUP


def vendor_packages(backends: Iterable[str]) -> list[dict[str, Any]]:
    """Backend, name, version, commit and dirtiness of every package that one of `backends` is installed from.

    A package that is installed for good is named by its version. One in editable mode is its sources as they are: it
    is dirty where these have changes that no commit holds, or lie in no git checkout at all.
    """
    wanted, out = set(backends), []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        module = importlib.import_module(entry.module)
        if entry.dist is None or module.BACKEND.name not in wanted:
            continue
        commit, dirty = "", False
        if root := editable_root(entry.dist):
            file = Path(module.__file__ or root)
            commit, dirty = _state(root, file.parent if hasattr(module, "__path__") else file)
        names = {"backend": module.BACKEND.name, "name": entry.dist.name, "version": entry.dist.version}
        out.append({**names, "commit": commit, "dirty": dirty})
    return sorted(out, key=lambda one: str(one["backend"]))


def editable_root(dist: Distribution) -> Path | None:
    """The folder that an editable installation was made from, as PEP 610 records it; None for any other."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            return None
        return Path(unquote(urlsplit(origin["url"]).path))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def _state(root: Path, sources: Path) -> tuple[str, bool]:
    commit = git_output(root, "rev-parse", "HEAD")
    changed = git_output(root, "status", "--porcelain", "--ignored=no", "--", str(sources))
    tracked = git_output(root, "ls-files", "--", str(sources))
    return commit or "", not commit or changed != "" or not tracked
