"""A package of a run with broken providers, made once, and a writable copy of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3hal.conform.package import write_report
from k3hal.conform.pool import Limits
from k3hal.conform.run import How, run
from k3hal.conform.selection import Selection, registry_with
from k3hal.dispatch import registry as registries
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import Registry, default_registry

from ..once import made_once

BACKEND = "broken_backend"
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def broken_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A quick run over the broken backend alone. Read-only by agreement; while it lives the backend is registered."""
    there = default_registry()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registries, "_default", [Registry(dict(there.backends), list(there.providers))])
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
        selection = Selection.on(probe("cpu"), "broken", "silu_and_mul", quick=True)

        def make(out: Path) -> None:
            run(selection, out, How(jobs=1, limits=Limits(check=6.0), plugins=(BACKEND,)), lambda *_: None)
            clean(out)

        registry_with([BACKEND])
        yield made_once(tmp_path_factory, "broken-package", make)


def clean(package: Path) -> None:
    """Let the package say that its tree was clean, as that of a test may not be."""
    edit(package, lambda report: report["statement"].update(dirty=False, commit="0" * 40))


def edit(package: Path, change: Edit) -> None:
    """Change the report, and write the statement that belongs to it."""
    report = json.loads((package / "report.json").read_text("utf-8"))
    change(report)
    write_report(report, {}, package)


@pytest.fixture
def package(broken_package: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(broken_package, tmp_path / "package"))


@pytest.fixture
def report(broken_package: Path) -> dict[str, Any]:
    return json.loads((broken_package / "report.json").read_text("utf-8"))
